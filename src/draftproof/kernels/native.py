"""The operations of a decoder layer, of sampling and of block verification, in C that is built once for a machine.

Knows: native.c, a C compiler, the processor's flags, torch's OpenMP runtime, the variable DRAFTPROOF_NATIVE. Does not
know: layers, models.

One row's outputs are the same bits whatever rows stand beside it, so that a token's logits do not depend on the batch
that it is verified in. What it gains stands in docs/log.md. DRAFTPROOF_NATIVE may be
    auto  (when unset) on x86-64 Linux with AVX-512 and a C compiler; for bfloat16 where the processor multiplies its
          pairs (AVX-512 BF16) and has no matrix unit (AMX, which oneDNN uses for prompts). Elsewhere torch's operations
          serve, and with a warning where the build fails or what it computes differs from them;
    0     never;
    1     for bfloat16 on processors with a matrix unit too, and an error where it cannot be had.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor

from draftproof.errors import UserError, reason
from draftproof.files import home, whole_file

VARIABLE = "DRAFTPROOF_NATIVE"
LEGAL = ("auto", "0", "1")
LANES = 16  # outputs that lie together
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-std=c11", "-O3", *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq")), "-fPIC", "-shared")
_NEEDS = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_MOST_DIM, _COLUMNS, _BLOCK = 256, 8, 512  # as native.c has them
_PATIENCE = 120  # seconds for the compiler
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _RowType:
    """What is built for a type of rows.

    Attributes:
        flags: for the compiler, beside those for all.
        needs: flags of the processor, beside those for all.
        unit: inputs whose weights are four bytes.
    """

    flags: tuple[str, ...]
    needs: frozenset[str]
    unit: int


_KINDS = {
    torch.bfloat16: _RowType(("-mavx512bf16",), frozenset({"avx512_bf16"}), 2),
    torch.float32: _RowType(("-DFLOAT32",), frozenset(), 1),
}


@dataclass(frozen=True, eq=False)
class Interleaved:
    """A weight in the order in which native.c reads it.

    Attributes:
        blocks: [outputs / 16, inputs / unit, 16, unit]; outputs padded with zeros.
        outs: how many outputs there are.
    """

    blocks: Float[Tensor, "blocks units lanes unit"]
    outs: int

    @classmethod
    def of(cls, weight: Float[Tensor, "out in"]) -> Interleaved:
        """From a plain weight of one of the types, its inputs a multiple of the type's unit."""
        (outs, ins), unit = weight.shape, _KINDS[weight.dtype].unit
        padded = F.pad(weight, (0, 0, 0, -outs % LANES)).view(-1, LANES, ins // unit, unit)
        return cls(padded.transpose(1, 2).contiguous(), outs)

    @property
    def ins(self) -> int:
        """How many inputs there are."""
        return self.blocks.shape[1] * self.blocks.shape[3]

    def to_dense(self) -> Float[Tensor, "out in"]:
        """A plain copy."""
        return self.blocks.transpose(1, 2).reshape(-1, self.ins)[: self.outs]


class Sight:
    """What tokens see, and the room that the layers of a pass share.

    Args:
        places: slot, first new position and number of new tokens of each row.
        seen: how many slots each token sees; all up to the row's last where a mask says more.
        mask: added to scores; None where `seen` says it all.
    """

    def __init__(
        self,
        places: Sequence[tuple[int, int, int]],
        seen: Sequence[Sequence[int]],
        mask: Float[Tensor, "rows 1 width horizon"] | None,
    ) -> None:
        self.rows, self.width = len(seen), len(seen[0])
        flat = list(itertools.chain.from_iterable(seen))
        self.horizon = max(flat)  # the most slots that a token sees
        self.mask = mask
        # made for C at once: a tensor costs several times as much, and small models have a pass in a millisecond
        self.places = (ctypes.c_int64 * (3 * self.rows))(*itertools.chain.from_iterable(places))
        self.seen = (ctypes.c_int64 * len(flat))(*flat)

    @functools.cached_property
    def _rooms(self) -> dict[int, Tensor]:
        return {}

    def room(self, size: int, dtype: torch.dtype, number: int) -> Tensor:
        """So many entries to work in, the same ones for every layer that asks for a room of this number."""
        if number not in self._rooms or self._rooms[number].numel() < size:
            self._rooms[number] = torch.empty(size, dtype=dtype)
        return self._rooms[number]


class Reading(ctypes.Structure):
    """What attention reads and writes in a pass, as native.c has it (`attention`), but for a layer's own tensors.

    It holds addresses: the tensors and the sight that it was made of must outlive it.
    """

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("fused", "cos", "sin", "keys", "values", "places", "seen", "mask")),
        *((name, ctypes.c_void_p) for name in ("out", "scratch")),
        *((name, ctypes.c_long) for name in ("rows", "width", "heads", "key_heads", "dim", "capacity", "horizon")),
        *((name, ctypes.c_long) for name in ("angles", "room")),
        ("scale", ctypes.c_float),
    ]

    @classmethod
    def of(
        cls,
        cos: Float[Tensor, "tokens 1 dim"],
        sin: Float[Tensor, "tokens 1 dim"],
        shape: Sequence[int],
        sight: Sight,
        *,
        heads: int,
        scale: float,
    ) -> Reading:
        """From tensors.

        Args:
            cos: of each token, contiguous in the last dimension.
            sin: the same, with the sign of `rotate_half` and cos's stride.
            shape: of the buffers of keys and of values, [slots, key heads, capacity, dim].
            sight: of this pass.
            heads: query heads; neighbours share a key head.
            scale: of scores.
        """
        _, key_heads, capacity, dim = shape
        assert cos.stride(0) == sin.stride(0), "halves of one table"
        queries = min(sight.width, _COLUMNS) * (heads // key_heads)
        room = (LANES + queries) * (sight.horizon + LANES)
        mask = sight.mask
        return cls(
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            places=ctypes.addressof(sight.places),
            seen=ctypes.addressof(sight.seen),
            mask=None if mask is None else mask.data_ptr(),
            scratch=sight.room(torch.get_num_threads() * room, torch.float32, 0).data_ptr(),
            rows=sight.rows,
            width=sight.width,
            heads=heads,
            key_heads=key_heads,
            dim=dim,
            capacity=capacity,
            horizon=0 if mask is None else mask.shape[-1],
            angles=cos.stride(0),
            room=room,
            scale=scale,
        )


class Operations:
    """The functions of native.c for rows of one type.

    Args:
        library: built from it.
        dtype: of the rows.
    """

    def __init__(self, library: Path, dtype: torch.dtype) -> None:
        self.dtype, self._unit = dtype, _KINDS[dtype].unit
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        made = ctypes.CDLL(str(library))
        pointer: Any = ctypes.c_void_p
        number: Any = ctypes.c_long
        made.draftproof_attach.argtypes = [pointer] * 3
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        made.draftproof_attach(*(ctypes.cast(getattr(torch_library, name), pointer) for name in names))
        self._product, self._norm, self._gated = made.draftproof_product, made.draftproof_norm, made.draftproof_gated
        self._attend, self._layers = made.draftproof_attend, made.draftproof_layers
        self._product.argtypes = [pointer] * 5 + [number] * 4
        self._norm.argtypes = [pointer] * 3 + [number] * 2 + [ctypes.c_float]
        self._gated.argtypes = [pointer] * 2 + [number] * 3
        self._attend.argtypes = [pointer, number]
        self._layers.argtypes = [pointer, number] + [pointer] * 5 + [number]
        self._softmax = made.draftproof_softmax
        self._softmax.argtypes = [pointer] * 2 + [number] * 3
        self._inverse_cdf = made.draftproof_inverse_cdf
        self._inverse_cdf.argtypes = [pointer] * 4 + [number] * 2
        self._legal, self._spread = made.draftproof_legal, made.draftproof_spread
        self._legal.argtypes = [pointer] + [number] * 2
        self._spread.argtypes = [pointer] * 3 + [number] * 3
        self._block, self._residual = made.draftproof_block, made.draftproof_residual
        self._block.argtypes = [pointer] * 6 + [number] * 4
        self._residual.argtypes = [pointer] * 2 + [number, ctypes.c_float, pointer, number]
        rows = (self._norm, self._gated, self._softmax, self._inverse_cdf, self._residual)
        for function in (self._product, self._attend, self._layers, *rows):
            function.restype = None
        for function in (self._legal, self._spread, self._block):
            function.restype = ctypes.c_int

    def __deepcopy__(self, memo: object) -> Operations:
        return self

    def multiplies(self, ins: int) -> bool:
        """Whether products with so many inputs are to be had."""
        return ins % self._unit == 0

    def attends(self, dim: int) -> bool:
        """Whether heads of this size can attend."""
        return dim % (LANES * self._unit) == 0 and dim <= _MOST_DIM

    def product(
        self,
        x: Float[Tensor, "*rows in"],
        weight: Interleaved,
        bias: Float[Tensor, " out"] | None = None,
        onto: Float[Tensor, "*rows out"] | None = None,
    ) -> Float[Tensor, "*rows out"]:
        """x W^T + b, sums in float32, rounded once; added to `onto` if there is one, and rounded again."""
        x, ins = x.contiguous(), x.shape[-1]
        assert x.dtype == self.dtype == weight.blocks.dtype, (x.dtype, weight.blocks.dtype)
        assert ins == weight.ins, (ins, weight.ins)
        y = x.new_empty((*x.shape[:-1], weight.outs))
        assert onto is None or (onto.shape == y.shape and onto.is_contiguous()), "rows are added to rows"
        self._product(
            x.data_ptr(),
            weight.blocks.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if onto is None else onto.data_ptr(),
            y.data_ptr(),
            x.numel() // ins,
            weight.outs,
            ins,
            torch.get_num_threads(),
        )
        return y

    def norm(
        self, x: Float[Tensor, "*rows dim"], scaled: Float32[Tensor, " dim"], least: float
    ) -> Float[Tensor, "*rows dim"]:
        """x scaled / sqrt(sum x^2 + least) of each row."""
        x = x.contiguous()
        y, dim = torch.empty_like(x), x.shape[-1]
        self._norm(x.data_ptr(), scaled.data_ptr(), y.data_ptr(), x.numel() // dim, dim, least)
        return y

    def gated(self, x: Float[Tensor, "*rows both"]) -> Float[Tensor, "*rows dim"]:
        """silu(gate) up, where each row holds gate and up."""
        x, dim = x.contiguous(), x.shape[-1] // 2
        y = x.new_empty((*x.shape[:-1], dim))
        self._gated(x.data_ptr(), y.data_ptr(), x.numel() // (2 * dim), dim, torch.get_num_threads())
        return y

    def softmax(self, x: Float32[Tensor, "*rows dim"]) -> Float32[Tensor, "*rows dim"]:
        """Softmax of each row, in memory of its own."""
        x = x.contiguous()
        y, dim = torch.empty_like(x), x.shape[-1]
        self._softmax(x.data_ptr(), y.data_ptr(), x.numel() // max(dim, 1), dim, torch.get_num_threads())
        return y

    def legal(self, x: Float[Tensor, "*rows dim"]) -> bool:
        """Whether no entry is NaN or +inf, and no row all -inf."""
        x, dim = x.contiguous(), x.shape[-1]
        return bool(self._legal(x.data_ptr(), x.numel() // max(dim, 1), dim))

    def spread(
        self, x: Float32[Tensor, "rows width"], ids: Int[Tensor, " width"], dim: int
    ) -> Float32[Tensor, "rows dim"]:
        """The rows at the columns `ids`, none of them twice, of wider ones, and zeros.

        Raises:
            ValueError: a column that they do not have.
        """
        x, ids, (rows, width) = x.contiguous(), ids.to(torch.int64).contiguous(), x.shape
        y = x.new_empty((rows, dim))
        if not self._spread(x.data_ptr(), ids.data_ptr(), y.data_ptr(), rows, width, dim):
            raise ValueError(f"columns {ids.tolist()[:3]}... are not all of 0 to {dim - 1}")
        return y

    def block(
        self,
        tokens: Int[Tensor, "B n"],
        q: Float32[Tensor, "B n V"] | None,
        p: Float32[Tensor, "B m V"],
        lengths: Int[Tensor, " B"],
    ) -> tuple[Float64[Tensor, "B n"], Float64[Tensor, "B n"]]:
        """P_i and h_i of Block Verification, arXiv 2403.10444, Algorithm 2; see `functional.chain.block_acceptance`.

        Raises:
            ValueError: shapes, lengths or tokens that do not belong together; C would read past their ends.
        """
        places, vocab = tokens.shape[1], p.shape[-1]
        if p.shape[1] < places or (q is not None and q.shape != (*tokens.shape, vocab)):
            raise ValueError(f"{places} drafted tokens came with p of {tuple(p.shape)}, or q of another shape")
        tokens, lengths = (each.to(torch.int64).contiguous() for each in (tokens, lengths))
        p, q = p.contiguous(), None if q is None else q.contiguous()
        running, h = (torch.empty(tokens.shape, dtype=torch.float64) for _ in range(2))
        given = tokens.data_ptr(), None if q is None else q.data_ptr(), p.data_ptr(), lengths.data_ptr()
        if not self._block(*given, running.data_ptr(), h.data_ptr(), *tokens.shape, *p.shape[1:]):
            raise ValueError(f"lengths {lengths.tolist()} of {places}, or drafted tokens outside 0 to {vocab - 1}")
        return running, h

    def residual(
        self, p: Float32[Tensor, " V"], q: Float32[Tensor, " V"] | None, drafted: int, scale: float, out: Tensor
    ) -> None:
        """max(scale p - q, 0), or p where that is 0 throughout, to `out`; no q stands for a point mass on `drafted`."""
        given = None if q is None else q.data_ptr()
        self._residual(p.data_ptr(), given, drafted, scale, out.data_ptr(), p.shape[-1])

    def inverse_cdf(self, weights: Float32[Tensor, "*rows vocab"], u: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
        """The first index of each row whose cumulative weight exceeds u times the total; see `rng.inverse_cdf`."""
        weights, goals = weights.contiguous(), u.to(torch.float64).contiguous()
        dim = weights.shape[-1]
        found = torch.empty(u.shape, dtype=torch.int64)
        running = torch.empty(_BLOCK + dim // _BLOCK + 1, dtype=torch.float64)
        addresses = (each.data_ptr() for each in (weights, goals, found, running))
        self._inverse_cdf(*addresses, u.numel(), dim)
        return found

    def attend(
        self,
        fused: Float[Tensor, "tokens heads dim"],
        given: Reading,
        keys: Float[Tensor, "slots key_heads capacity dim"],
        values: Float[Tensor, "slots key_heads capacity dim"],
    ) -> Float[Tensor, "tokens inner"]:
        """Turn queries and keys, write keys and values, weigh values; outputs of padding are zeros.

        Args:
            fused: queries, keys and values of every token; contiguous, overwritten.
            given: the rest.
            keys: the layer's buffer.
            values: likewise.
        """
        assert fused.is_contiguous(), "overwritten in place"
        out = fused.new_empty((fused.shape[0], given.heads * given.dim))
        given.fused, given.out = fused.data_ptr(), out.data_ptr()
        given.keys, given.values = keys.data_ptr(), values.data_ptr()
        self._attend(ctypes.addressof(given), torch.get_num_threads())
        return out

    def layers(
        self,
        weights: ctypes.Array[Any],
        x: Float[Tensor, "tokens size"],
        given: Reading,
        buffers: tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p]],
        work: Float[Tensor, " room"],
    ) -> None:
        """Decoder layers after one another.

        Args:
            weights: native.c's `layer`, of each.
            x: hidden states; contiguous, overwritten by the last layer's.
            given: of attention.
            buffers: addresses of each layer's keys, and of its values.
            work: room of this type, as large as native.c says.
        """
        assert x.is_contiguous(), "overwritten in place"
        keys, values = buffers
        addresses = x.data_ptr(), work.data_ptr()
        self._layers(weights, len(weights), ctypes.byref(given), keys, values, *addresses, torch.get_num_threads())


def softmax(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
    """Softmax of each row: natively for float32 on this machine's CPU where that is to be had, else by torch."""
    made = single(x)
    return x.softmax(-1) if made is None else made.softmax(x)


def legal(x: Float[Tensor, "*rows dim"]) -> bool:
    """Whether no entry is NaN or +inf, and no row all -inf; natively where that is to be had."""
    made = operations(x)
    return bool(x.amax(-1).isfinite().all()) if made is None else made.legal(x)


def spread(x: Float[Tensor, "rows width"], ids: Int[Tensor, " width"], dim: int) -> Float[Tensor, "rows dim"]:
    """The rows at the columns `ids`, none of them twice, of wider ones, and zeros; natively where that is to be had."""
    made = single(x)
    return x.new_zeros((x.shape[0], dim)).index_copy_(1, ids, x) if made is None else made.spread(x, ids, dim)


def single(rows: Tensor) -> Operations | None:
    """`operations` for rows of probabilities, which they are for where these are float32."""
    return operations(rows) if rows.dtype == torch.float32 else None


def operations(like: Tensor) -> Operations | None:
    """This machine's, for weights such as `like`; None where there are none, or where they are not wanted.

    Raises:
        UserError: an unknown value of DRAFTPROOF_NATIVE, or one that asks for what cannot be had.
    """
    if like.device.type != "cpu" or like.dtype not in _KINDS:
        return None
    return _operations(os.environ.get(VARIABLE) or "auto", like.dtype)


def kinds() -> list[str]:
    """The types of rows that there are native operations for here."""
    asked = os.environ.get(VARIABLE) or "auto"
    return [str(dtype).removeprefix("torch.") for dtype in _KINDS if _operations(asked, dtype) is not None]


@functools.cache
def _operations(asked: str, dtype: torch.dtype) -> Operations | None:
    if asked not in LEGAL:
        raise UserError(f"{VARIABLE} is {asked!r}: legal are {', '.join(LEGAL)}")
    if asked == "0":
        return None
    try:
        _require_processor(dtype, matrix_unit=asked == "1")
        made = _built(dtype)
        _require_agreement(made)
    except (OSError, UserError, AttributeError, subprocess.SubprocessError) as error:
        if asked == "1":
            raise UserError(f"{VARIABLE} is '1', but native operations cannot be had: {reason(error)}") from error
        told = logging.INFO if isinstance(error, _LackingError) else logging.WARNING
        _log.log(told, "no native operations, torch's slower ones serve: %s (%s=0 is quiet)", reason(error), VARIABLE)
        return None
    return made


class _LackingError(UserError):
    """This machine is of another kind, and nothing is wrong."""


def _require_processor(dtype: torch.dtype, *, matrix_unit: bool) -> None:
    """That the products can run here, and that nothing faster is at hand.

    Args:
        dtype: of the rows.
        matrix_unit: whether a processor that has one will do, too.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise _LackingError(f"they are for Linux on x86_64, and this is {sys.platform} on {platform.machine()}")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    if missing := (_NEEDS | _KINDS[dtype].needs) - flags:
        raise _LackingError(f"the processor lacks {', '.join(sorted(missing))}")
    if dtype == torch.bfloat16 and "amx_bf16" in flags and not matrix_unit:
        raise _LackingError("the processor has AMX, which oneDNN's products use")


def _built(dtype: torch.dtype) -> Operations:
    """Operations for rows of a type, from a library compiled before, or now; it is kept where that can be done."""
    flags = (*_FLAGS, *_KINDS[dtype].flags)
    name = f"{hashlib.sha256(_SOURCE.read_bytes() + ' '.join(flags).encode()).hexdigest()[:16]}.so"
    kept = home() / "native" / name
    if kept.exists():
        return Operations(kept, dtype)
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise _LackingError("no C compiler was found (CC, cc, gcc, clang)")
    try:
        _compile(compiler, flags, kept)
    except OSError:  # nowhere to keep it
        with tempfile.TemporaryDirectory(prefix="draftproof-") as folder:
            passing = Path(folder) / name
            _compile(compiler, flags, passing)
            return Operations(passing, dtype)  # what is loaded outlives its file
    return Operations(kept, dtype)


def _compile(compiler: str, flags: tuple[str, ...], made: Path) -> None:
    with whole_file(made) as work:
        command = [compiler, *flags, str(_SOURCE), "-lm", "-o", str(work)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)  # noqa: S603
        if done.returncode:
            raise UserError(f"{compiler} failed: {done.stderr.strip()[-500:]}")


def _require_agreement(made: Operations) -> None:
    """That products, softmax, draws and the block rule equal what they must to rounding, and the rest exactly.

    A layer as a whole is compared with transformers' when a model is loaded (`hf.probe`).
    """
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(size, generator=generator).to(made.dtype) for size in ((200, 334), (200,)))
    slack = 2 * torch.finfo(made.dtype).eps
    for rows in (1, 2, 5, 13, 40):
        x = torch.randn((rows, 334), generator=generator).to(made.dtype)
        wanted = F.linear(x.double(), weight.double(), bias.double())
        found = made.product(x, Interleaved.of(weight), bias).double()
        if not torch.allclose(found, wanted, rtol=slack, atol=1e-4):
            raise UserError(f"its products of {rows} rows are off by {(found - wanted).abs().max().item():.3g}")
    scores = torch.randn((3, 5001), generator=generator)
    wanted = scores.double().softmax(-1)
    if not torch.allclose(made.softmax(scores).double(), wanted, rtol=1e-5, atol=0):
        raise UserError("its softmax differs from torch's")
    shown = [torch.full((1, 37), value, dtype=made.dtype) for value in (0.0, math.nan, math.inf, -math.inf)]
    if [made.legal(row) for row in shown] != [True, False, False, False]:
        raise UserError("it takes illegal logits for legal ones")
    ids = torch.tensor([1, 4, 9])
    if not torch.equal(made.spread(scores[:, :3], ids, 11)[:, ids], scores[:, :3]):
        raise UserError("rows spread over a vocabulary are not where they belong")
    p, q = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [1.0, 0.0, 0.0]]]), torch.tensor([[[0.2, 0.5, 0.3]] * 2])
    running, h = made.block(torch.tensor([[1, 2]]), q, p, torch.tensor([2]))
    rest = torch.empty(3)
    made.residual(p[0, 1], q[0, 1], 2, 0.6, rest)
    known = [0.6, 1.0, 0.12 / 0.52, 1.0, 0.0, 0.0, 0.12]  # by hand
    if not torch.allclose(torch.cat([running[0], h[0], rest.double()]), torch.tensor(known).double(), atol=1e-6):
        raise UserError("its block rule differs from the paper's")
    places = torch.tensor([0, 2500, 5000])  # a uniform in the middle of each one's share
    middle = (wanted.cumsum(-1) - wanted / 2).gather(-1, places.unsqueeze(-1)).squeeze(-1)
    if not torch.equal(made.inverse_cdf(wanted.float(), middle), places):
        raise UserError("its draws differ from those of a running sum")
