"""Speed and price of decoding on machines that were not measured: a roofline of passes, batches, devices, clusters.

A pass over B requests, each with w tokens, reads every weight once and the keys and values of B contexts, and makes two
floating-point operations for each weight and token. It takes the larger one of the two times, and a fixed time for each
layer. With the weights divided over D devices (tensor parallelism) both shrink to a share of 1 / D, and each layer adds
two sums over the devices. Speculation raises w, so it is free while weights are what a pass waits for, and costs its
full price where arithmetic is.

Source: the roofline model of Williams, Waterman and Patterson (2009); the form for transformers, with sums over
devices, follows Pope et al., arXiv 2211.05102.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from draftproof.theory.lengths import iid_block_efficiency

GAIN = 1.05  # least speed relative to plain decoding at which speculation counts as worth it
_SUMS = 2  # of a layer, over the devices: after attention and after the MLP


@dataclass(frozen=True)
class Machine:
    """One device.

    Attributes:
        name: how tables call it.
        operations: floating-point operations a second in the weights' format.
        bandwidth: bytes of memory read a second.
        memory: bytes.
        link: bytes a second that a device sends to the others; 0 where it stands alone.
        reached: shares of operations and bandwidth that programs reach.
        start: seconds that every layer of a pass takes beside them.
        row: seconds of sampling and verifying, for each token of a pass.
        sum: seconds that a sum over devices takes beside its bytes.
    """

    name: str
    operations: float
    bandwidth: float
    memory: float = float("inf")
    link: float = 0.0
    reached: tuple[float, float] = (1.0, 1.0)
    start: float = 0.0
    row: float = 0.0
    sum: float = 0.0

    @property
    def ridge(self) -> float:
        """Operations for each byte at which both times are equal."""
        return self.operations * self.reached[0] / (self.bandwidth * self.reached[1])


@dataclass(frozen=True)
class Model:
    """A transformer, as far as its time depends on it.

    Attributes:
        name: how tables call it.
        weights: number of weights that a pass multiplies with.
        bytes: of a weight.
        layers: number of layers.
        width: of a hidden state.
        cached: numbers that a position keeps for attention, in all layers: keys and values.
        queries: width of all query heads of a layer.
        number: bytes of a key's number and of a hidden state's.
    """

    name: str
    weights: float
    layers: int
    width: int
    cached: int
    queries: int
    bytes: float = 2.0
    number: float = 2.0

    @property
    def size(self) -> float:
        """Bytes of all weights."""
        return self.weights * self.bytes

    def quantized(self, bits: int) -> Model:
        """With weights of so many bits, and one more for their share of scales and offsets."""
        return replace(self, name=f"{self.name}, {bits} bits", bytes=(bits + 1) / 8)

    def first(self, share: float) -> Model:
        """A smaller model with this share of the layers and weights."""
        return replace(
            self,
            name=f"{share:g} of {self.name}",
            weights=self.weights * share,
            layers=max(round(self.layers * share), 1),
            cached=round(self.cached * share),
        )


def pass_seconds(
    machine: Machine, model: Model, rows: int, tokens: int = 1, *, context: int = 0, devices: int = 1
) -> float:
    """Seconds of a forward pass.

    Args:
        machine: each of the devices.
        model: what is computed.
        rows: requests.
        tokens: tokens of each that are read.
        context: positions of each that were read before.
        devices: among which the weights are divided.
    """
    read = rows * tokens
    attention = 4.0 * model.layers * model.queries * (context + tokens) * read
    arithmetic = (2.0 * model.weights * read + attention) / devices / (machine.operations * machine.reached[0])
    numbers = model.size + rows * (context + tokens) * model.cached * model.number
    memory = numbers / devices / (machine.bandwidth * machine.reached[1])
    return machine.start * model.layers + max(arithmetic, memory) + _sums(machine, model, read, devices)


def _sums(machine: Machine, model: Model, read: int, devices: int) -> float:
    """Seconds of the sums over devices: each sends its part to the others and gets theirs back (a ring)."""
    if devices == 1:
        return 0.0
    if not machine.link:
        raise ValueError(f"devices: expected 1, as {machine.name} has no link to others, got {devices}")
    size = read * model.width * model.number
    return _SUMS * model.layers * (machine.sum + 2.0 * (devices - 1) / devices * size / machine.link)


@dataclass(frozen=True)
class Speculation:
    """How drafts are made, and how often a drafted token is accepted after accepted ones (`rate`).

    Without a draft model drafting costs nothing (lookups). `longest` is the longest draft.
    """

    draft: Model | None
    rate: float
    longest: int = 16

    def tokens(self, drafted: int) -> float:
        """Expected tokens of a round."""
        return iid_block_efficiency(self.rate, drafted)


@dataclass(frozen=True)
class Setting:
    """Where and what is decoded.

    Attributes:
        machine: each device.
        model: the target.
        context: positions of a request that were read before.
        devices: among which the target is divided; the draft model is on one of them.
    """

    machine: Machine
    model: Model
    context: int = 0
    devices: int = 1

    def round_seconds(self, rows: int, draft: Model | None = None, drafted: int = 0) -> float:
        """Seconds of a round in which every request drafts so many tokens."""
        seconds = pass_seconds(self.machine, self.model, rows, drafted + 1, context=self.context, devices=self.devices)
        seconds += self.machine.row * rows * (drafted + 1)
        if draft is not None:
            seconds += drafted * pass_seconds(self.machine, draft, rows, context=self.context)
        return seconds

    def speed(self, rows: int, how: Speculation | None = None, drafted: int = 0) -> float:
        """Tokens a second of all requests together."""
        if how is None or not drafted:
            return rows / self.round_seconds(rows)
        return rows * how.tokens(drafted) / self.round_seconds(rows, how.draft, drafted)

    def best(self, rows: int, how: Speculation) -> tuple[int, float]:
        """The draft length with the most tokens a second, 0 among them, and its speed relative to plain decoding."""
        plain = self.speed(rows)
        speeds = [self.speed(rows, how, drafted) / plain for drafted in range(how.longest + 1)]
        length = max(range(len(speeds)), key=speeds.__getitem__)
        return length, speeds[length]

    def capacity(self, draft: Model | None = None, *, spare: float = 0.1) -> int:
        """Requests whose keys and values fit the memory beside the weights.

        A draft model is there too, on each device at worst; the share `spare` is left for everything else.
        """
        own = (1 - spare) * self.machine.memory * self.devices - self.model.size
        each = self.context * self.model.cached * self.model.number
        if draft is not None:
            own -= draft.size * self.devices
            each += self.context * draft.cached * draft.number
        return max(int(own // each), 0) if each else (2**31 if own >= 0 else 0)


def turned_off_at(gains: Callable[[int], float], most: int = 4096, least: float = GAIN) -> int | None:
    """The smallest number of requests from which on speculation gains less than `least`; None if it pays up to `most`.

    `gains` is the speed relative to plain decoding for a number of requests, falling from some number on.
    """
    if gains(most) >= least:
        return None
    low, high = 0, most  # gains(high) < least; everything above stays so
    while high - low > 1:
        middle = (low + high) // 2
        if gains(middle) >= least:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class Cluster:
    """How devices are used: replicas of a group among which the target is divided.

    Attributes:
        replicas: number of groups.
        devices: of each group.
        rows: requests of each group at a time.
        seconds: of a token of a request.
        speed: tokens a second of all groups.
        gain: of speculation.
        length: of drafts.
    """

    replicas: int
    devices: int
    rows: int
    seconds: float
    speed: float
    gain: float
    length: int

    def price(self, hour: float) -> float:
        """Price of a million tokens, from that of a device for an hour."""
        return hour * self.replicas * self.devices / 3600 / self.speed * 1e6


def layouts(setting: Setting, how: Speculation, total: int, rows: int, sizes: Iterable[int]) -> list[Cluster]:
    """Every way to use `total` devices for `rows` requests at a time; each replica decodes equally many, rounded up.

    Args:
        setting: of one device; its number of devices is not used.
        how: of speculation, with the best length for each number of requests.
        total: devices.
        rows: requests at a time, over all of them.
        sizes: numbers of devices of a group. Those that do not divide `total`, have too little memory, or make more
            replicas than there are requests, are left out.
    """
    made = []
    for devices in sizes:
        replicas = total // devices
        if total % devices or rows < replicas:
            continue
        each = -(-rows // replicas)
        one = replace(setting, devices=devices)
        if each > one.capacity(how.draft):
            continue
        length, gain = one.best(each, how)
        speed = replicas * one.speed(each, how, length)
        made.append(Cluster(replicas, devices, each, replicas * each / speed, speed, gain, length))
    return made
