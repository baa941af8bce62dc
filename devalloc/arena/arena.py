"""`Arena`: a caching allocator for one device, and tensors and heaps in its memory.

A tensor's memory returns with the last reference to its storage, autograd's included; see
`devalloc.arena.tensors`. The cache of an arena without references stays until the last tensor is
gone.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from devalloc.arena.block import Block, TorchOutOfMemory
from devalloc.arena.cache.allocator import Cache
from devalloc.arena.cache.private_pools import PrivatePool
from devalloc.arena.options import cuda_place_of, resolve_limit, resolve_source, resolve_stream
from devalloc.arena.policies.policy import Policy
from devalloc.arena.pytorch_methods import PytorchMethods
from devalloc.arena.regions import RegionMethods, Regions
from devalloc.arena.statistics_methods import StatisticsMethods
from devalloc.arena.tensors import Key, TensorStay, without_elements
from devalloc.common.arguments import known_device, sizes_of
from devalloc.common.owner import Owner
from devalloc.errors import DoubleFree, InvalidArgument, OutOfMemory
from devalloc.sizes import format_size, parse_size, quote
from devalloc.sources import Capabilities, Segment, SimulatedSource, Source, VirtualSource

if TYPE_CHECKING:
    from devalloc.heap import Heap
    from devalloc.interop.cuda_core import ArenaMemoryResource
    from devalloc.interop.holder import Holder
    from devalloc.interop.pytorch import Pool


class Arena(RegionMethods, PytorchMethods, StatisticsMethods, Owner):
    """Memory of one device, cached, for tensors, blocks and heaps.

    Parameters
    ----------
    device : torch.device, str or int, optional
        Default: the source's device; without a source the current CUDA device, or the CPU where
        there is none.
    source : str or Source, optional
        ``"cuda"`` (cudaMalloc), ``"virtual"`` (memory mapped into reserved addresses),
        ``"async"`` (cudaMallocFromPoolAsync), ``"host"`` (host memory), or a source object.
        Default: ``"cuda"`` for a CUDA device, ``"host"`` for the CPU.
    policy : str or Policy
        ``"torch"``, ``"tiny"``, ``"bfc"``, ``"auto_growth"``, ``"frugal"``, or a policy object
        with options; or PyTorch's settings, such as ``"max_split_size_mb:64"``.
    limit : int, str or float, optional
        The most bytes that are taken from the source, up to 2**62, in whole multiples of its
        granularity; a float is a fraction of the device's memory.
    share_streams : bool
        Reuse memory across streams, ordered by events: see `devalloc.cache.Cache`.

    Raises
    ------
    InvalidArgument
        For a device, source, policy or limit that cannot work.

    Notes
    -----
    All methods may be called from any thread. Allocation and free wait for nothing unless memory
    runs out. Memory belongs to the stream that is named when it is allocated, by default the
    current one. CUDA's per-thread default stream is refused: its handle, 2, means another stream
    in each thread.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        source: str | Source | None = None,
        policy: str | Policy = "torch",
        limit: int | str | float | None = None,
        *,
        share_streams: bool = False,
    ) -> None:
        self._source = resolve_source(device, source)
        self.device = self._source.device
        self._cache = Cache(
            self._source,
            policy,
            limit=resolve_limit(limit, self.device),
            share_streams=share_streams,
        )
        self._streams = self._cache.streams
        self._reuse = self._cache.reuse
        self._closed = False
        self._installed = False
        # By the region they belong to; None for those outside of all.
        self._pytorch: dict[str | None, Pool] = {}
        self._regions = Regions(self._cache)
        weakref.finalize(self, self._regions.abandon).atexit = False
        # For an arena that is dropped without close(). Live tensors keep the cache alive.
        weakref.finalize(self, self._cache.close).atexit = False

    @classmethod
    def install(
        cls,
        device: torch.device | str | int | None = None,
        source: str | Source | None = None,
        policy: str | Policy = "torch",
        limit: int | str | float | None = None,
        *,
        share_streams: bool = False,
        front: bool = True,
    ) -> Arena:
        """Make an arena that is PyTorch's CUDA allocator for the whole process, all threads.

        Call it before anything uses the GPU. The parameters are those of `Arena`; the default
        device is the current CUDA device. For a second device call it again. It cannot be undone,
        and the arena lives as long as the process.

        While the arena's own memory serves and no call looks at or changes the arena, allocations
        and frees are done in C by the policy's rule (docs/design/host.md). With ``front=False``, or
        with a policy that must see every call, each of them calls Python.

        Every tensor is then a block of the arena: the policy decides, `stats`, `snapshot`, the
        limit and the history cover everything, and ``Tensor.record_stream`` and
        ``torch.cuda.empty_cache`` reach the arena. PyTorch's own statistics raise RuntimeError.
        Capture graphs within `capture`.

        PyTorch does not check whether such an allocator failed. When the arena runs out, its error
        is shown as a `devalloc.interop.pluggable.AllocationWarning`, and the tensor gets the
        address 0. Any operation on that tensor fails: with RuntimeError, or with CUDA's illegal
        memory access, after which the process can no longer use the GPU. A program that must
        continue after running out of memory needs `use`, where it is a ``torch.OutOfMemoryError``.

        Raises
        ------
        InvalidArgument
            If PyTorch already uses CUDA, if an arena is installed for this device already, if there
            is no CUDA device, if the device or the source is not one of CUDA, or as for `Arena`.
        DevallocError
            If this PyTorch has no pluggable allocators, or the callbacks cannot be compiled: they
            need the C compiler and the Python headers that Triton needs.
        """
        from devalloc.interop import pluggable

        if not torch.cuda.is_available():
            raise InvalidArgument("no CUDA device is available: there is no allocator to replace")
        if not isinstance(front, bool):
            raise InvalidArgument(f"front is True or False, not {quote(front)}")
        # Bad arguments are found first, without memory and CUDA: what follows cannot be undone.
        pluggable.require_unserved(cuda_place_of(device, source))
        trial = SimulatedSource()
        trial.granularity = getattr(source, "granularity", trial.granularity)
        able = getattr(getattr(source, "capabilities", None), "mappable", source == "virtual")
        trial.capabilities = Capabilities(mappable=able)
        cls(source=trial, policy=policy, limit=limit)
        pluggable.replace_allocator()
        arena = cls(device, source, policy, limit, share_streams=share_streams)
        pluggable.serve(arena._cache, arena, front)
        arena._installed = True
        return arena

    # Life -----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Refuse new allocations and give back all unused memory.

        Memory of live tensors, heaps and blocks goes back when they end. This call and those later
        frees wait for streams that still use freed memory. Closing again is harmless, and gives
        back what could not be given back before.

        Raises
        ------
        InvalidArgument
            If the arena was made by `install`.
        """
        if self._installed:
            raise InvalidArgument("the arena is PyTorch's allocator until the process ends")
        self._closed = True
        try:
            self._empty_pytorch()
        finally:
            self._regions.abandon()
            self._cache.close()

    def __enter__(self) -> Arena:
        self._require_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._cache.policy.name
        reserved = format_size(self._cache.reserved)
        return f"<devalloc.Arena on {self.device}, {state}, {reserved} reserved>"

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidArgument("the arena is closed")

    # Allocating -----------------------------------------------------------------------------------

    def empty(
        self,
        *size: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        requires_grad: bool = False,
        stream: int | None = None,
    ) -> torch.Tensor:
        """A contiguous tensor of uninitialised memory, like ``torch.empty``.

        The memory returns to the arena with the last reference to the tensor's storage; views and
        tensors that autograd saved are such references.

        Parameters
        ----------
        *size : int, or one sequence of int
            The shape: ``empty(2, 3)`` or ``empty((2, 3))``. A dtype may follow: ``empty((2, 3),
            torch.int8)``.
        dtype : torch.dtype, optional
            Default: torch's default dtype.
        device : torch.device, str or int, optional
            Only the arena's own is accepted.
        requires_grad : bool
            Whether autograd records operations on the tensor.
        stream : int, optional
            Handle of the stream that owns the memory; default: the current one.

        Raises
        ------
        OutOfMemory
            It is a ``torch.OutOfMemoryError`` too.
        InvalidArgument
            For a shape with a size that is negative or not an int, an unknown type or stream, a
            quantised type, another device, or a closed arena.
        """
        if dtype is None and len(size) == 2 and isinstance(size[1], torch.dtype):
            *size, dtype = size  # type: ignore[assignment]
        if len(size) == 1 and not isinstance(size[0], int):
            try:
                dims: tuple[Any, ...] = tuple(size[0])
            except TypeError:
                dims = sizes_of(size[0])
        else:
            dims = tuple(size) if size else sizes_of(None)
        if dtype is None:
            dtype = torch.get_default_dtype()
        if device is not None:
            self._require_here(device)
        # (Made definite first: True is no stream, but as a key it equals 1.)
        key = dims, dtype, self._streams.current() if stream is None else self._owner(stream)
        try:
            parked = self._reuse.stacks.get(key)
        except TypeError:
            parked = None  # what cannot be looked up is refused below
        if parked and not self._reuse.closed and type(math.prod(dims)) is int:
            try:
                tensor: torch.Tensor = parked.pop().take()
                return tensor.requires_grad_() if requires_grad else tensor
            except IndexError:
                pass  # another thread was faster, or something else refers to the block
        tensor = self._new_tensor(key)
        return tensor.requires_grad_() if requires_grad else tensor

    def zeros(self, *size: Any, requires_grad: bool = False, **options: Any) -> torch.Tensor:
        """`empty`, with zeros in it. The current stream writes them, and owns the memory."""
        return self._filled(0, size, requires_grad, options)

    def ones(self, *size: Any, requires_grad: bool = False, **options: Any) -> torch.Tensor:
        """`empty`, with ones in it. The current stream writes them, and owns the memory."""
        return self._filled(1, size, requires_grad, options)

    def full(
        self, size: Any, fill_value: Any, *, requires_grad: bool = False, **options: Any
    ) -> torch.Tensor:
        """`empty` with one value in it, whose type is the default dtype as for ``torch.full``."""
        if options.get("dtype") is None:
            options["dtype"] = torch.full((), fill_value).dtype
        return self._filled(fill_value, (size,), requires_grad, options)

    def _filled(
        self, value: Any, size: tuple[Any, ...], requires_grad: bool, options: dict[str, Any]
    ) -> torch.Tensor:
        if "stream" in options:
            raise InvalidArgument(
                "the current stream writes the values and owns the memory; enter the stream, or "
                "fill what empty(stream=) gives"
            )
        tensor = self.empty(*size, **options)
        with torch.no_grad():
            tensor.fill_(value)
        return tensor.requires_grad_() if requires_grad else tensor

    def empty_like(
        self, other: torch.Tensor, *, dtype: torch.dtype | None = None, **options: Any
    ) -> torch.Tensor:
        """`empty` with the shape, type and strides that ``torch.empty_like`` would give."""
        like = torch.empty_like(other, dtype=dtype, device="meta")
        requires_grad = options.pop("requires_grad", False)
        if like.is_contiguous():
            tensor = self.empty(like.shape, dtype=like.dtype, **options)
        else:
            flat = self.empty(like.numel(), dtype=like.dtype, **options)
            tensor = flat.as_strided(like.shape, like.stride())
        return tensor.requires_grad_() if requires_grad else tensor

    def _require_here(self, device: torch.device | str | int) -> None:
        wanted, index = known_device(device), self.device.index
        if wanted.type != self.device.type or wanted.index not in (None, index or wanted.index):
            raise InvalidArgument(f"the arena is on {self.device}, not on {wanted}")

    def _new_tensor(self, key: Key) -> torch.Tensor:
        self._require_open()
        dims, dtype, stream = key
        for size in dims:
            if type(size) is not int or size < 0:
                dims = sizes_of(dims)
        if not isinstance(dtype, torch.dtype):
            raise InvalidArgument(
                f"a dtype is one of torch's, such as torch.int8, not {quote(dtype)}"
            )
        owner = self._owner(stream)
        key = dims, dtype, owner
        nbytes = math.prod(dims) * dtype.itemsize
        if nbytes == 0:
            return without_elements(dims, dtype, self.device)
        address = self._malloc(nbytes, owner)
        try:
            stay = TensorStay(self._cache, key, address, nbytes)
        except BaseException:
            self._cache.free(address)
            raise
        return stay.take()

    def _owner(self, stream: int | None) -> int:
        given = self._streams.current() if stream is None else stream
        return resolve_stream(given, self.device)

    def _malloc(self, nbytes: int, owner: int, claim: int = 0) -> int:
        cache = self._cache
        try:
            try:
                return cache.malloc(nbytes, owner, claim=claim)
            except OutOfMemory:
                if not self._empty_pytorch():
                    raise
                return cache.malloc(nbytes, owner, claim=claim)
        except OutOfMemory as error:
            raise TorchOutOfMemory(str(error)) from error

    def alloc(self, nbytes: int | str, stream: int | None = None) -> Block:
        """A block of at least ``nbytes`` bytes, aligned to 256 bytes; raises what `empty` raises.

        Under every policy but "tiny", a block of 0 bytes has the address 0.
        """
        self._require_open()
        size = parse_size(nbytes)
        owner = self._owner(stream)
        block = Block(self)
        # (No call between these two: from here on the block gives its memory back when it ends.)
        block.address = self._malloc(size, owner, block.claim)
        block.freed = False
        if block.address:
            block.nbytes = self._cache.size_of(block.address)
        return block

    def free(self, block: Block) -> None:
        """Give a block back.

        Raises
        ------
        DoubleFree
            If the block was freed before. Nothing has changed then, even if its address was given
            out again.
        InvalidArgument
            If it is not a block of this arena.

        After any other error, Ctrl-C included, you may free the block again: either that frees it,
        or it raises DoubleFree because the first call did.
        """
        if not isinstance(block, Block) or block.arena is not self:
            raise InvalidArgument(
                f"{self!r} frees blocks that its alloc returned, not {block!r}; free it where it "
                "came from"
            )
        if not block.address:
            if block.freed:
                raise DoubleFree(f"{block!r} was freed before; free it once")
            block.freed = True
            return
        try:
            self._cache.free(block.address, block.claim)
        except DoubleFree:
            block.freed = True
            raise DoubleFree(f"{block!r} was freed before; free it once") from None
        block.freed = True

    def heap(self, capacity: int | str) -> Heap:
        """A `devalloc.Heap` in memory of this arena.

        The memory returns when the heap is closed and its last tensor is gone. Kernels must be able
        to run on the arena's device, as for any heap. In a `region` the heap sleeps with it: what
        is allocated stays allocated, and the contents of blocks are what the region keeps.
        """
        from devalloc.heap import Heap

        self._require_open()
        return Heap(capacity, device=self.device, source=_ArenaSource(self))

    def record_stream(self, what: torch.Tensor | Block, stream: torch.cuda.Stream | int) -> None:
        """Record that ``stream`` also uses a tensor's memory or a block.

        When the memory is freed, it becomes available only after ``stream`` has done the work that
        is queued there at that time. Use this and not ``Tensor.record_stream``, which does nothing
        for memory that PyTorch does not own.

        Raises
        ------
        InvalidArgument
            If the memory is not a live allocation of this arena, or the stream is not on its device
            or is CUDA's per-thread default stream.
        """
        handle = stream if isinstance(stream, int) else self._handle(stream)
        address, claim = self._place_of(what, "record_stream")
        if address:
            if refusal := self._cache.private.refusal_at(address):
                raise InvalidArgument(f"cannot record a stream: {refusal}")
            self._cache.record_stream(address, resolve_stream(handle, self.device), claim)

    def _place_of(self, what: Any, purpose: str) -> tuple[int, int | None]:
        """The address and the claim of a tensor's memory or a block; for the call ``purpose``."""
        if isinstance(what, Block):
            if what.arena is not self:
                raise InvalidArgument(
                    f"{what!r} is a block of {what.arena!r}, not of {self!r}; call {purpose} there"
                )
            if what.freed:
                raise InvalidArgument(f"{what!r} was freed before; {purpose} takes live blocks")
            return what.address, what.claim
        if isinstance(what, torch.Tensor) and self._is_here(what.device):
            return what.untyped_storage().data_ptr(), None
        given = f"a tensor on {what.device}" if isinstance(what, torch.Tensor) else quote(what)
        raise InvalidArgument(
            f"{purpose} takes a block or a tensor of {self!r}, not {given}; for PyTorch's own "
            "memory there is torch.cuda"
        )

    def _is_here(self, device: torch.device) -> bool:
        # The device of a caller's own source may have no index.
        return device.type == self.device.type and self.device.index in (None, device.index)

    def _handle(self, stream: torch.cuda.Stream) -> int:
        if not isinstance(stream, torch.cuda.Stream) or not self._is_here(stream.device):
            raise InvalidArgument(
                f"a stream is a torch.cuda.Stream on {self.device} or its handle, not {stream!r}"
            )
        return stream.cuda_stream

    # Graphs ---------------------------------------------------------------------------------------

    def graph_pool(self) -> PrivatePool:
        """Memory for one CUDA graph, or for several that share it: see `capture`.

        Inside a `region` it belongs to that one, and sleeps with it: a graph that is replayed after
        `resume` finds its memory at the same addresses.
        """
        self._require_open()
        return self._regions.graph_pool()

    def capture(self, pool: PrivatePool) -> AbstractContextManager[None]:
        """A context for a capture: within it this thread's allocations come from ``pool``.

        Meanwhile the arena queries no event, waits for nothing, and gives nothing back to the
        source. The pool keeps its memory until its last `PrivatePool.release`.

        Raises
        ------
        InvalidArgument
            For a closed arena, or a pool that is not this arena's or has been released.
        """
        self._require_open()
        # (None, with which `Cache.route` sends allocations to no pool, would keep nothing.)
        if not isinstance(pool, PrivatePool):
            raise InvalidArgument(
                f"a pool is one that this arena's graph_pool made, not {quote(pool)}"
            )
        return self._cache.route(pool, capture=True)

    # Other libraries ------------------------------------------------------------------------------

    def triton_allocator(self) -> Callable[[int, int, int | None], Holder]:
        """A function for ``triton.set_allocator``: scratch memory of launches from this arena.

        Triton holds a buffer only until the launch call returns, long before the kernel ends. The
        buffer belongs to the launch's stream, so its memory is next used by work that is queued on
        that stream after the kernel. In a CUDA graph the address is part of the graph: capture the
        graph within `capture`, whose pool keeps the memory.

        ``triton.set_allocator`` sets a context variable: call it in each thread that launches.
        """
        from devalloc.interop import triton

        self._require_open()
        return triton.allocator(self)

    def memory_resource(self) -> ArenaMemoryResource:
        """A ``cuda.core.MemoryResource``: ``resource.allocate(nbytes, stream=stream)``.

        A buffer belongs to the stream it was allocated on. If it is closed on another stream, its
        memory is reused only after the work that was queued on that stream before. Buffers keep the
        arena alive. Where there is a GPU, cuda.core needs a current device for buffers of host
        memory too: call ``cuda.core.Device().set_current()`` first.

        Raises
        ------
        InvalidArgument
            For a closed arena.
        DevallocError
            If cuda.core cannot be imported.
        """
        self._require_open()
        from devalloc.interop.cuda_core import ArenaMemoryResource

        return ArenaMemoryResource(self)

    # Upkeep ---------------------------------------------------------------------------------------

    @property
    def cache(self) -> Cache:
        """The cache under this arena, for what has no method here: history, callbacks,
        streams."""
        return self._cache

    def set_limit(self, limit: int | str | float | None) -> None:
        """Change the limit; InvalidArgument if it is below what is in use."""
        self._cache.set_limit(resolve_limit(limit, self.device))

    def empty_cache(self) -> int:
        """Give all idle memory back to the source; returns its bytes. Waits for pending frees.

        Idle memory that PyTorch took in `use` goes back too, and with it PyTorch's own idle memory
        may, but not while a thread is inside `use`. The source ``"virtual"`` gives its idle handles
        back to the device, except during a capture.
        """
        outside = self._empty_pytorch()
        released = outside + self._cache.empty_cache()
        if isinstance(self._source, VirtualSource) and not self._streams.capturing():
            self._source.trim()
        return released


class _ArenaSource:
    """An arena as the source of a heap."""

    granularity = 256

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.device = arena.device
        self.capabilities = arena._source.capabilities
        self._has_data = False

    def refusal_at(self, address: int) -> str:
        """Why the memory cannot be used now; empty if it can."""
        return self._arena._cache.private.refusal_at(address)

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        arena = self._arena
        address = arena._malloc(nbytes, arena._owner(stream))
        arena._regions.heaps.add(address)
        # A heap takes its data first. Its later segments record what is allocated, and without them
        # the heap would be lost: it is always backed up, even in a region without backups.
        if self._has_data and arena._regions.region_at(address) is not None:
            arena._cache.private.set_rule(address, "backup")
        self._has_data = True
        return address

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        self._arena._regions.heaps.discard(address)
        # (Called when a segment ends, which may be in the middle of any other call.)
        self._arena._cache.free_in_finalizer(address)

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        return self._arena._source.view(segment, offset, nbytes)
