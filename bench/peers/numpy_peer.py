"""NumPy as a peer: fancy indexing, where that is what one would write without paged ops."""

from __future__ import annotations

from bench.peers import Peer


class NumpyPeer(Peer):
    """Only moves data: its attention would be none to compare with."""
