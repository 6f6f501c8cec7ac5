"""Other libraries' models running on the public ops. Nothing here is imported unless asked for."""
