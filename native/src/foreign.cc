// The one function that XLA calls: it looks up a kernel by name and passes arrays, numbers and XLA's own threads. Another function serves Python,
// with NumPy arrays and threads that start and stop with the call.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#define LUTJAX_FORKS
#endif

#include "exported.h"
#include "levels.h"
#include "pages.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// Shared work. The calling thread participates, and waits only for tasks that other threads have begun: a task that starts too
// late finds nothing left, so a pool whose threads all wait, as in nested calls, cannot deadlock.
struct Work {
  Work(int64_t n, void (*body)(void*, int64_t), void* data) : n(n), body(body), data(data) {}

  void help() {
    int64_t mine = 0;
    for (int64_t i; (i = next.fetch_add(1)) < n; ++mine) body(data, i);
    if (mine > 0 && done.fetch_add(mine) + mine == n) {
      std::lock_guard<std::mutex> lock(mutex);
      all_done.notify_all();
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [this] { return done.load() == n; });
  }

  const int64_t n;
  void (*const body)(void*, int64_t);
  void* const data;
  std::atomic<int64_t> next{0}, done{0};
  std::mutex mutex;
  std::condition_variable all_done;
};

// Number of threads per loop, for tests; 0: the pool's threads.
std::atomic<int64_t> threads_wanted{0};

int64_t threads_of(const ffi::ThreadPool& pool) {
  const int64_t wanted = threads_wanted.load();
  return wanted > 0 ? wanted : pool.num_threads();
}

// Whether this process was forked after sharing work: the pool's threads do not exist here, and waiting for their locks would deadlock.
bool in_fork() {
#ifdef LUTJAX_FORKS
  static std::atomic<pid_t> of_pool{0};
  const pid_t own = getpid();
  pid_t first = 0;
  return !of_pool.compare_exchange_strong(first, own) && first != own;
#else
  return false;
#endif
}

void run(void* self, int64_t n, void (*body)(void*, int64_t), void* data) {
  if (in_fork()) {
    for (int64_t i = 0; i < n; ++i) body(data, i);
    return;
  }
  auto* pool = static_cast<ffi::ThreadPool*>(self);
  auto work = std::make_shared<Work>(n, body, data);
  const int64_t helpers = std::min<int64_t>(threads_of(*pool), n) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool->Schedule([work] { work->help(); });
  work->help();
  work->wait();
}

// Like `run`, with its own threads.
void run_in_threads(void* self, int64_t n, void (*body)(void*, int64_t), void* data) {
  Work work(n, body, data);
  std::vector<std::thread> threads;
  const int64_t helpers = std::min(*static_cast<int64_t*>(self), n) - 1;
  try {
    for (int64_t i = 0; i < helpers; ++i) threads.emplace_back([&work] { work.help(); });
  } catch (const std::system_error&) {  // no more threads: those that are there do all
  }
  work.help();
  for (std::thread& thread : threads) thread.join();
}

// Requests huge pages for a large output. Each untouched 4 KB page costs a fault, and these take longer than
// a kernel that reads little; written pages stay unchanged.
void ask_for_huge_pages(void* data, size_t bytes) {
#ifdef __linux__
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (start + kPage - 1) & ~(kPage - 1), last = (start + bytes) & ~(kPage - 1);
  if (first + 4 * kPage <= last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

// Memory limit per call, for tests; below 0: unlimited.
std::atomic<int64_t> most_memory{-1};

// Memory for one call: blocks, each prefixed with the previous block's address.
struct Memory {
  static constexpr std::align_val_t kAlignment{64};
  static constexpr size_t kFront = 64;

  ~Memory() {
    while (last != nullptr) {
      void* block = last;
      last = *static_cast<void**>(block);
      ::operator delete(block, kAlignment);
    }
  }

  void* allocate(size_t bytes) {
    const int64_t most = most_memory.load();
    if (bytes > SIZE_MAX / 2 || (most >= 0 && bytes > static_cast<size_t>(most) - used)) return nullptr;
    void* block = ::operator new(kFront + bytes, kAlignment, std::nothrow);
    if (block == nullptr) return nullptr;
    used += bytes;
    *static_cast<void**>(block) = last;
    last = block;
    return static_cast<char*>(block) + kFront;
  }

  void* last = nullptr;
  size_t used = 0;
};

void* allocate(void* self, size_t bytes) { return static_cast<Memory*>(self)->allocate(bytes); }

bool type_of(ffi::DataType type, lutjax::Type* found) {
  switch (type) {
    case ffi::PRED: *found = lutjax::Type::boolean; return true;
    case ffi::S8: *found = lutjax::Type::int8; return true;
    case ffi::U8: *found = lutjax::Type::uint8; return true;
    case ffi::S32: *found = lutjax::Type::int32; return true;
    case ffi::U32: *found = lutjax::Type::uint32; return true;
    case ffi::F16: *found = lutjax::Type::float16; return true;
    case ffi::BF16: *found = lutjax::Type::bfloat16; return true;
    case ffi::F32: *found = lutjax::Type::float32; return true;
    case ffi::F64: *found = lutjax::Type::float64; return true;
    default: return false;
  }
}

ffi::Error call_kernel(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view name,
                       ffi::Span<const int64_t> integers, ffi::Span<const double> numbers) {
  lutjax::Kernel kernel = lutjax::find(name);
  if (kernel == nullptr)
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "lutjax-cpu: no kernel \"" + std::string(name) + "\" for this CPU");
  std::vector<ffi::AnyBuffer> buffers;
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    buffers.push_back(*buffer);
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    buffers.push_back(**buffer);
  }
  std::vector<lutjax::Array> arrays;
  for (size_t i = args.size(); i < buffers.size(); ++i) ask_for_huge_pages(buffers[i].untyped_data(), buffers[i].size_bytes());
  for (ffi::AnyBuffer& buffer : buffers) {
    const auto shape = buffer.dimensions();
    lutjax::Array array{buffer.untyped_data(), lutjax::Type::boolean, static_cast<int32_t>(shape.size()), shape.begin()};
    if (!type_of(buffer.element_type(), &array.type))
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, "lutjax-cpu: " + std::string(name) + " got a type that no kernel has");
    arrays.push_back(array);
  }
  for (size_t i = args.size(); i < buffers.size(); ++i)
    for (size_t j = 0; j < args.size(); ++j)
      if (buffers[i].untyped_data() == buffers[j].untyped_data()) lutjax::updated_in_place(buffers[i].untyped_data(), buffers[i].size_bytes());
  Memory memory;
  const lutjax::Call call{arrays.data(),   arrays.data() + args.size(), integers.begin(), numbers.begin(),
                          {run, &pool, threads_of(pool)}, allocate, &memory};
  const char* wrong = kernel(call);
  if (wrong != nullptr)
    return ffi::Error(ffi::ErrorCode::kInternal, "lutjax-cpu: " + std::string(name) + ": " + wrong);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(handler, call_kernel,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::string_view>("kernel")
                           .Attr<ffi::Span<const int64_t>>("integers")
                           .Attr<ffi::Span<const double>>("numbers"));

LUTJAX_EXPORT XLA_FFI_Error* lutjax_cpu_handler(XLA_FFI_CallFrame* frame) { return handler(frame); }

// Runs a kernel on arrays in any memory, with this many threads. Returns null, or an error message.
LUTJAX_EXPORT const char* lutjax_cpu_run(const char* name, const lutjax::Array* inputs, const lutjax::Array* outputs, const int64_t* integers,
                                         const double* numbers, int64_t n_threads) {
  const lutjax::Kernel kernel = lutjax::find(name);
  if (kernel == nullptr) return "there is no such kernel for this CPU";
  Memory memory;
  return kernel({inputs, outputs, integers, numbers, {run_in_threads, &n_threads, n_threads}, allocate, &memory});
}

// Sets the threads per loop, for tests; 0: the pool's threads. Returns the previous value.
LUTJAX_EXPORT int64_t lutjax_cpu_use_threads(int64_t wanted) { return threads_wanted.exchange(wanted < 0 ? 0 : wanted); }

// Sets the memory limit per call in bytes, for tests; below 0: unlimited. Returns the previous value.
LUTJAX_EXPORT int64_t lutjax_cpu_use_memory(int64_t most) { return most_memory.exchange(most); }
