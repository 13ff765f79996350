"""Host memory readable by NVIDIA GPUs: registration by the driver, and cells for programs.

A *cell* is eight bytes that remain registered until the process ends. It holds an array's address,
or 0. A compiled program embeds the cell's address, so it may outlive the array, the array may be
replaced, and the program never reads freed memory.

Registered memory is locked, and has the same address on the CPU and on all GPUs of the process.
"""

import contextlib
import ctypes
import functools
import math
import mmap
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

_PORTABLE, _DEVICEMAP = 1, 2  # flags of cuMemHostRegister
_NON_BLOCKING = 1  # of cuStreamCreate
_SAME_ADDRESS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_OF_PAGE = 512  # cells of a page
# Address of the first page of cells, where it is free: far from the heap, libraries and stacks.
_WISHED = 0x200000000000
_ALIGNED = 16  # bytes, as kernels read
lock = threading.RLock()  # lock for cells and their ownership


class RegistrationError(OSError):
    """Error for memory that the driver did not register."""


@runtime_checkable
class Driver(Protocol):
    """GPU driver calls for cells. Addresses and sizes are in bytes."""

    def register(self, address: int, n_bytes: int) -> None:
        """Lock memory and let all GPUs read it; raise RegistrationError on failure."""

    def unregister(self, address: int) -> None:
        """Undo `register`."""

    def wait(self) -> None:
        """Wait until the GPUs have finished all earlier work."""

    def copy_out(self, array: jax.Array, out: np.ndarray) -> None:
        """Copy a computed GPU array into registered memory, without waiting for a program."""

    def copy_in(self, array: np.ndarray, out: jax.Array) -> None:
        """Copy registered memory into an unused GPU array, without waiting for programs."""


class CUDA:
    """NVIDIA driver, through its library, in JAX's contexts; RegistrationError if unsupported."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._call("cuInit", ctypes.c_uint(0))
        self._contexts = {
            d: self._context(d.local_hardware_id) for d in jax.local_devices(backend="cuda")
        }
        # Streams that do not wait for the default stream, one for each direction, so that copies
        # overlap programs.
        self._streams = {
            (d, name): self._stream(context)
            for d, context in self._contexts.items()
            for name in ("cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2")
        }
        self._first = next(iter(self._contexts.values()))

    def register(self, address: int, n_bytes: int) -> None:
        with self._enter_context(self._first):
            self._call(
                "cuMemHostRegister_v2",
                ctypes.c_void_p(address),
                ctypes.c_size_t(n_bytes),
                ctypes.c_uint(_PORTABLE | _DEVICEMAP),
            )

    def unregister(self, address: int) -> None:
        with self._enter_context(self._first):
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def wait(self) -> None:
        for context in self._contexts.values():
            with self._enter_context(context):
                self._call("cuCtxSynchronize")

    def copy_out(self, array: jax.Array, out: np.ndarray) -> None:
        self._copy("cuMemcpyDtoHAsync_v2", out.ctypes.data, array.unsafe_buffer_pointer(), array)

    def copy_in(self, array: np.ndarray, out: jax.Array) -> None:
        self._copy("cuMemcpyHtoDAsync_v2", out.unsafe_buffer_pointer(), array.ctypes.data, out)

    def _copy(self, name: str, to: int, source: int, of_gpu: jax.Array) -> None:
        """Copy an array's bytes and wait for the copy only. The array must stay alive."""
        (device,) = of_gpu.devices()
        with self._enter_context(self._contexts[device]):
            stream = self._streams[device, name]
            addresses = (ctypes.c_void_p(to), ctypes.c_void_p(source))
            self._call(name, *addresses, ctypes.c_size_t(of_gpu.nbytes), stream)
            self._call("cuStreamSynchronize", stream)

    def _context(self, number: int) -> ctypes.c_void_p:
        device, same, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
        self._call("cuDeviceGetAttribute", ctypes.byref(same), ctypes.c_int(_SAME_ADDRESS), device)
        # Programs contain the CPU's address, so the GPU must read memory at the same address.
        if not same.value:
            raise RegistrationError(f"GPU {number} has registered memory at addresses of its own")
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context

    def _stream(self, context: ctypes.c_void_p) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        with self._enter_context(context):
            self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        return stream

    @contextlib.contextmanager
    def _enter_context(self, context: ctypes.c_void_p) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
            raise RegistrationError(f"{name}: {(text.value or b'error %d' % status).decode()}")


@functools.cache
def driver() -> Driver | None:
    """Return the driver for this process's NVIDIA GPUs, or None.

    Raises:
      RegistrationError: a GPU does not read registered memory at the CPU's address.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return CUDA(library)


def driver_of(array: Any) -> Driver | None:
    """Return the driver for an array on a single GPU; None for other or several devices."""
    if not isinstance(array, jax.Array) or len(array.devices()) > 1:
        return None
    return driver() if next(iter(array.devices())).platform == "gpu" else None


def allocate_registered(shape: tuple[int, ...], dtype: Any, driver: Driver) -> np.ndarray:
    """Return an array in registered memory, which is released with the array.

    No GPU may use the array at that time.
    """
    n_bytes = max(math.prod(shape) * np.dtype(dtype).itemsize, 1)
    memory = np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8)
    address = memory.ctypes.data
    driver.register(address, n_bytes)
    # Not at exit: the driver may be gone then.
    weakref.finalize(memory, driver.unregister, address).atexit = False
    n_used = math.prod(shape) * np.dtype(dtype).itemsize
    array: np.ndarray = memory[:n_used].view(dtype).reshape(shape)
    return array


def view(array: jax.Array) -> jax.Array:
    """Return a second array in a GPU array's memory, or raise RegistrationError if JAX copied.

    The memory must outlive the view and its reading programs.
    """
    place = array.unsafe_buffer_pointer()
    about = {"shape": array.shape, "typestr": array.dtype.str, "data": (place, False), "version": 3}
    other = jnp.asarray(types.SimpleNamespace(__cuda_array_interface__=about))
    # JAX copies memory that it does not recognize as its own device's.
    if other.unsafe_buffer_pointer() != place:
        raise RegistrationError("JAX copies arrays of others")
    return other


class Cell:
    """Permanent eight bytes at `address` that hold an array's address."""

    def __init__(self, driver: Driver):
        self._driver = driver
        self._word = _new_word(driver)
        self.address: int = self._word.ctypes.data
        self._array: np.ndarray | None = None

    def has_locked(self, array: np.ndarray) -> bool:
        """Return True if an array's memory is already registered."""
        return (id(self._driver), array.ctypes.data) in _registered

    def point(self, array: np.ndarray | None) -> None:
        """Let future programs read an array, or none; running programs read the previous one."""
        with lock:
            if array is self._array:
                return
            if self._array is not None:
                # In this order: no program may read memory that is no longer registered.
                self._driver.wait()
                self._word[0] = 0
                # Once more, for programs that started before the cell was empty.
                self._driver.wait()
                before, self._array = self._array, None
                _release(self._driver, before)
            if array is not None:
                if not array.flags.c_contiguous or array.ctypes.data % _ALIGNED:
                    raise RegistrationError(
                        "the array is not contiguous, or begins at an odd address"
                    )
                # The address comes last, so that programs never find memory that is not registered.
                _keep(self._driver, array)
                self._array = array
                self._word[0] = array.ctypes.data

    def wait(self) -> None:
        """Wait until no program reads the array."""
        if self._array is not None:
            self._driver.wait()

    def abandon(self) -> None:
        """Empty the cell later: the GPU may be waiting for the thread that collects garbage."""
        if self._array is not None:
            threading.Thread(
                target=self.point, args=(None,), name="lutjax-unregister", daemon=True
            ).start()


_pages: dict[int, tuple[np.ndarray, list[int]]] = {}  # of each driver, the last page of cells
_registered: dict[tuple[int, int], list[Any]] = {}  # arrays, and how many cells hold them
_kept: list[Any] = []  # pages of cells, for ever


def _new_word(driver: Driver) -> np.ndarray:
    with lock:
        page, used = _pages.get(id(driver), (None, [_OF_PAGE]))
        if page is None or used[0] == _OF_PAGE:
            page = _new_page()
            driver.register(page.ctypes.data, page.nbytes)
            _kept.append((driver, page))
            used = [0]
            _pages[id(driver)] = page, used
        used[0] += 1
        return page[used[0] - 1 : used[0]]


def _new_page() -> np.ndarray:
    """Return zeros at an address that every process is likely to have free."""
    # Programs that read tables then contain the same addresses in every process with the same table
    # order, and a compilation cache finds them. With any other address they are different programs.
    # Without MAP_FIXED, the system chooses another address if this one is taken.
    n_bytes = 8 * _OF_PAGE
    system = ctypes.CDLL(None)
    system.mmap.restype = ctypes.c_void_p
    address = system.mmap(
        ctypes.c_void_p(_WISHED + n_bytes * len(_kept)),
        ctypes.c_size_t(n_bytes),
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        -1,
        ctypes.c_long(0),
    )
    if address in (None, ctypes.c_void_p(-1).value):
        raise RegistrationError("the system gave no page of memory")
    page: np.ndarray = np.ctypeslib.as_array((ctypes.c_uint64 * _OF_PAGE).from_address(address))
    return page


def _keep(driver: Driver, array: np.ndarray) -> None:
    """Register an array, which several cells may hold."""
    key = id(driver), array.ctypes.data
    if key not in _registered:
        driver.register(array.ctypes.data, max(array.nbytes, 1))
        _registered[key] = [array, 0]
    _registered[key][1] += 1


def _release(driver: Driver, array: np.ndarray) -> None:
    key = id(driver), array.ctypes.data
    _registered[key][1] -= 1
    if not _registered[key][1]:
        del _registered[key]
        driver.unregister(array.ctypes.data)
