"""The peers: one small adapter each, which makes candidates of the same work for those who ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.case import Candidate

if TYPE_CHECKING:
    from bench.case import Setting


class Peer:
    """What a peer can do. Each method gives its candidates for a case by name; none where it has no such op.

    A candidate's check only says whether it computes the same thing, within the peer's own roundings.
    """

    def decode(self, setting: Setting, shape: Any, order: str, most: int) -> dict[str, Candidate]:
        return {}

    def write(self, setting: Setting, data: Any) -> dict[str, Candidate]:
        return {}

    def copy(self, setting: Setting, data: Any) -> dict[str, Candidate]:
        return {}

    def prefill(self, setting: Setting, shape: Any) -> dict[str, Candidate]:
        return {}

    def overhead(self, setting: Setting, shape: Any) -> dict[str, Candidate]:
        return {}

    def waited(self) -> float:
        """Seconds for which threads in other processes of the peer were ready and had no CPU."""
        return 0.0

    def close(self) -> None:
        pass


class Peers:
    """The peers that were asked for and are here; `notes` says which are not, and why."""

    def __init__(self, names: tuple[str, ...] = ("torch", "numpy"), **options: Any) -> None:
        self.notes: dict[str, str] = {}
        self.found: dict[str, Peer] = {}
        for name in names:
            try:
                self.found[name] = _open(name, **options)
            except (ImportError, OSError, RuntimeError) as error:
                self.notes[name] = str(error)

    def candidates(self, op: str, *arguments: Any) -> dict[str, Candidate]:
        """All peers' candidates for an op."""
        found: dict[str, Candidate] = {}
        for peer in self.found.values():
            found |= getattr(peer, op)(*arguments)
        return found

    def waited(self) -> float:
        return sum(peer.waited() for peer in self.found.values())

    def close(self) -> None:
        for peer in self.found.values():
            peer.close()


def _open(name: str, **options: Any) -> Peer:
    if name == "torch":
        from bench.peers.torch_peer import TorchPeer

        return TorchPeer()
    if name == "numpy":
        from bench.peers.numpy_peer import NumpyPeer

        return NumpyPeer()
    if name == "vllm":
        from bench.peers.vllm_peer import VllmPeer

        return VllmPeer(**options)
    raise ValueError(f"peers: {name!r} is not one of torch, numpy, vllm")
