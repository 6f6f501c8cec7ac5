"""A thin LLM engine over paged_ops: block manager, scheduler, small decoders, demo.

Importing this package pulls in neither torch nor paged_ops: the block manager and the scheduler are plain
Python and NumPy, and can be read, tested and reused on their own.
"""
