"""Exchange of the selected keys and values only, at the selection's own granularity.

Round one: every rank tells the others of its sequence group which of their blocks it needs, one bit a block; the
message has a fixed size, so nobody has to announce counts. Round two: rows of K | V, in the order of those bits. The
gradients of the rows travel the same way back and are added in a fixed order; no row number is ever sent.

Dims: P places of the sequence group, b batch, n key/value heads of this rank, Nb key blocks of a place, R rows sent or
received, t tokens of a block, d head dim. A lane is one (batch, key/value head).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv.context_parallel.comm import SubGroup
from megatron_dsv.context_parallel.key_stages import KeyStages, cut, true_places
from megatron_dsv.context_parallel.sequence_cp import Shipment
from megatron_dsv.kernels.selection import KVSelection


class SelectiveExchange:
    """Which rows go where; made before q, k and v exist, shared by forward, backward and recomputation.

    Args:
        selection: of this rank's heads and query groups over all keys of the sequence; None for a rank without heads.
        stages: which keys arrive when.
        group: the sequence group; all its members make one together.
        lanes: (b, n); n is the same for all members.
        device: where masks live.
        everything: send all rows: no bits travel, as both sides know them.
        fixed_width: stage buffers have room for all keys of their ranks instead of those needed, so that no result
            depends on which heads share a buffer.
        what: names the exchange.
    """

    def __init__(self, selection: KVSelection | None, stages: KeyStages, group: SubGroup, *, lanes: tuple[int, int],
                 device: torch.device, everything: bool, fixed_width: bool, what: str) -> None:
        self.stages, self.group, self._lanes, self._fixed_width = stages, group, lanes, fixed_width
        shape = (*lanes, stages.num_blocks)
        self._cut = None if selection is None else cut(selection, stages, everything=everything)
        need = torch.zeros(shape, dtype=torch.bool, device=device) if self._cut is None else self._cut.need
        position = torch.zeros(shape, dtype=torch.int64, device=device) if self._cut is None else self._cut.position
        self._need, self._position = stages.by_place(need), stages.by_place(position)
        if everything:
            self._asked = torch.ones_like(self._need)
            self._asked[stages.me] = False
        else:
            bits = group.exchange_evenly(pack_bits(self._need), f"{what}, needed blocks")
            self._asked = unpack_bits(bits, stages.place_blocks)
        self._counted = torch.stack((self._need.sum(-1).flatten(1), self._asked.sum(-1).flatten(1)))
        self._ready = self._start_copy()
        self._counts: list | None = None
        self._rows: dict[tuple[str, int], Tensor] = {}

    def keys(self, stage: int) -> KVSelection | None:
        """The selection of a stage's buffer; None for a rank without heads."""
        blocks = self.stages.place_blocks if stage == 0 else self._width(stage)
        return None if self._cut is None else self._cut.part(stage, blocks)

    def send(self, stage: int, k: Tensor, v: Tensor) -> Shipment:
        """Own rows that others asked for, of k, v [Nb * t, b, n, d]."""
        block, batch, head = self._outgoing(stage)
        rows = self._pair(k, v, block, batch, head)
        return Shipment(rows, self._per_place(1, self.stages.targets(stage)),
                        self._per_place(0, self.stages.sources(stage)))

    def receive(self, stage: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [R, t, 2, d] of a stage -> its k and v, [width * t, b, n, d] with each lane's rows in front."""
        (b, n), (_, t, _, d), width = self._lanes, rows.shape, self._width(stage)
        lane, place = self._slots(stage)
        # What no row fills lies behind the lane's length and is never read.
        buffer = rows.new_empty((b * n * width, t, 2, d))
        buffer.index_copy_(0, lane * width + place, rows)
        both = buffer.view(b, n, width * t, 2, d).permute(3, 2, 0, 1, 4)
        return both[0], both[1]

    def send_gradients(self, stage: int, dk: Tensor, dv: Tensor) -> Shipment:
        """Gradients of a stage's k and v back to the rows' owners."""
        lane, place = self._slots(stage)
        n = max(1, self._lanes[1])
        rows = self._pair(dk, dv, place, lane // n, lane % n)
        return Shipment(rows, self._per_place(0, self.stages.sources(stage)),
                        self._per_place(1, self.stages.targets(stage)))

    def add_gradients(self, stage: int, rows: Tensor, total: Tensor) -> None:
        """Adds returned gradients [R, t, 2, d] to ``total`` [b, n, Nb * t, 2, d], place by place, each row once."""
        if not len(rows):
            return
        flat = total.view(self._lanes[0] * self._lanes[1] * self.stages.place_blocks, *rows.shape[1:])
        places = self._asked_places(stage) % len(flat)
        sizes = [count for count in self._per_place(1, self.stages.targets(stage)) if count]
        for index, part in zip(places.split(sizes), rows.split(sizes)):
            # Rows of one place are distinct, so this is a plain sum: no atomics, the same bits every time.
            flat.index_copy_(0, index, flat.index_select(0, index) + part.to(total.dtype))

    def _start_copy(self) -> torch.cuda.Event | None:
        if not self._counted.is_cuda:
            return None
        host = torch.empty(self._counted.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(self._counted, non_blocking=True)
        self._counted = host
        event = torch.cuda.Event()
        event.record()
        return event

    def _host_counts(self) -> list:
        """[need, asked][P][b * n] rows: the one wait of the block, on work that was queued before q, k and v."""
        if self._counts is None:
            if self._ready is not None:
                self._ready.synchronize()
            self._counts = self._counted.tolist()
        return self._counts

    def _per_place(self, which: int, places: tuple[int, ...]) -> list[int]:
        counts = self._host_counts()[which]
        return [sum(counts[j]) if j in places else 0 for j in range(self.group.size)]

    def _width(self, stage: int) -> int:
        """Blocks of a stage's buffer."""
        sources = self.stages.sources(stage)
        if self._fixed_width:
            return len(sources) * self.stages.place_blocks
        need = self._host_counts()[0]
        return max((sum(need[j][lane] for j in sources) for lane in range(self._lanes[0] * self._lanes[1])), default=0)

    def _asked_places(self, stage: int) -> Tensor:
        """int64 [R]: flat places of the rows that go out, in the stage's part of the mask [targets, b, n, Nb]."""
        return self._listed("asked", stage, self._asked, 1, self.stages.targets(stage))

    def _listed(self, name: str, stage: int, mask: Tensor, which: int, places: tuple[int, ...]) -> Tensor:
        if (name, stage) not in self._rows:
            self._rows[name, stage] = true_places(_parts(mask, places), sum(self._per_place(which, places)))
        return self._rows[name, stage]

    def _outgoing(self, stage: int) -> tuple[Tensor, Tensor, Tensor]:
        """(block, batch, head) of the rows that go out."""
        places, blocks, n = self._asked_places(stage), self.stages.place_blocks, max(1, self._lanes[1])
        lane = places // blocks % max(1, self._lanes[0] * n)
        return places % blocks, lane // n, lane % n

    def _slots(self, stage: int) -> tuple[Tensor, Tensor]:
        """(lane, place in the stage's buffer) of the rows that come in."""
        sources = self.stages.sources(stage)
        places = self._listed("need", stage, self._need, 0, sources)
        lane = places // self.stages.place_blocks % max(1, self._lanes[0] * self._lanes[1])
        return lane, _parts(self._position, sources).reshape(-1)[places]

    def _pair(self, k: Tensor, v: Tensor, block: Tensor, batch: Tensor, head: Tensor) -> Tensor:
        """[R, t, 2, d]: blocks of k and v [blocks * t, b, n, d], one after the other."""
        t, (_, b, n, d) = self.stages.block, k.shape
        rows = k.new_empty((block.numel(), t, 2, d))
        if block.numel():
            # Whole rows of d by one index: several indices would move element by element.
            tokens = block[:, None] * t + torch.arange(t, device=block.device)
            index = ((tokens * b + batch[:, None]) * n + head[:, None]).view(-1)
            for number, x in enumerate((k, v)):
                rows[:, :, number] = x.reshape(-1, d).index_select(0, index).view(-1, t, d)
        return rows


def _parts(x: Tensor, places: tuple[int, ...]) -> Tensor:
    """``x[places]`` without an index that would have to go to the device first."""
    return torch.stack([x[place] for place in places])


def pack_bits(mask: Tensor) -> Tensor:
    """bool [..., m] -> uint8 [..., ceil(m / 8)], the first element in the lowest bit."""
    m = mask.shape[-1]
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, -m % 8)).unflatten(-1, (-(-m // 8), 8))
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, m: int) -> Tensor:
    """uint8 [..., ceil(m / 8)] -> bool [..., m], the inverse of ``pack_bits``."""
    bits = packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (bits & 1).bool().flatten(-2)[..., :m]
