/* The fake GPU: CUDA's runtime, the few driver calls and the few library calls that torch needs an answer from.

   Everything else that torch asks for does nothing and returns 0 (build.py writes those). What is kept track of:
   memory on each device and page-locked memory, the current device of each thread, which devices have a context, and
   handles of streams and events, which are numbers. Copies copy; kernels do nothing.

   The log (FAKE_GPU_LOG, appended to) has one line per call: thread, its current device, word, rest. Words:
     context               the first call that needs one: the driver makes a context here, with its memory
     use                   cudaSetDevice, which makes a context, too
     alloc ADDRESS BYTES   alloc and pin are real; what torch's caching allocator has at hand it does not ask for
     pin ADDRESS BYTES
     launch STREAM         a kernel (cuBLAS and NCCL take a stream at another time, and are not noted)
     copy STREAM TO FROM BYTES   TO and FROM: device, pinned or host
     fill STREAM BYTES
     stream STREAM         made
     record EVENT STREAM
     wait STREAM EVENT     the stream, not the host
     sync-stream STREAM, sync-event EVENT, sync-device     the host waits
     note TEXT             the program's own words (fake_gpu_note)
   A stream of 0 is the default stream of the line's device. */

#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CALL __attribute__((visibility("default")))
#define DEVICES 8
#define MEGABYTE (1ull << 20)
#define TOTAL (143771 * MEGABYTE) /* what nvidia-smi shows of an H200 */
#define CONTEXT (600 * MEGABYTE)
#define REGIONS (1 << 16)

enum { UNKNOWN, DEVICE, PINNED };
static const char *kinds[] = {"host", "device", "pinned"};
static struct region { char *start; size_t bytes; int kind, device; } regions[REGIONS];
static int filled;
static size_t used[DEVICES];
static int contexts[DEVICES];
static __thread int current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int devices(void) {
    char *number = getenv("FAKE_GPUS");
    return number ? atoi(number) : 1;
}

static void say(const char *format, ...) {
    static int file = -2;
    char line[512];
    if (file == -2) {
        char *path = getenv("FAKE_GPU_LOG");
        file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    }
    if (file < 0) return;
    int length = snprintf(line, sizeof line, "%d %d ", gettid(), current);
    va_list rest;
    va_start(rest, format);
    length += vsnprintf(line + length, sizeof line - length - 1, format, rest);
    va_end(rest);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    if (write(file, line, length) != length) abort(); /* one write per line: threads do not mix */
}

/* Of each call that needs a context on the current device. */
static void touch(void) {
    pthread_mutex_lock(&lock);
    int first = !contexts[current];
    contexts[current] = 1;
    pthread_mutex_unlock(&lock);
    if (first) say("context");
}

#define NOTED(...) do { touch(); say(__VA_ARGS__); } while (0)

CALL void fake_gpu_note(const char *text) { say("note %s", text); }

/* -- memory */

static void add(void *start, size_t bytes, int kind) {
    pthread_mutex_lock(&lock);
    int place = 0;
    while (place < filled && regions[place].start) place++;
    if (place == REGIONS) abort();
    if (place == filled) filled++;
    regions[place] = (struct region){start, bytes, kind, current};
    pthread_mutex_unlock(&lock);
}

static struct region find(const void *address, int forget) {
    struct region found = {0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < filled; i++) {
        char *start = regions[i].start;
        if (!start || (char *)address < start || (char *)address >= start + regions[i].bytes) continue;
        found = regions[i];
        if (forget) regions[i].start = 0;
        break;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

CALL cudaError_t cudaMalloc(void **address, size_t bytes) {
    touch();
    pthread_mutex_lock(&lock);
    int fits = used[current] + bytes + CONTEXT <= TOTAL;
    if (fits) used[current] += bytes;
    pthread_mutex_unlock(&lock);
    *address = 0;
    if (!fits) return cudaErrorMemoryAllocation;
    size_t grain = 2 * MEGABYTE; /* torch relies on alignment */
    char *start = mmap(0, bytes + 2 * grain, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return cudaErrorMemoryAllocation;
    *address = (void *)(((size_t)start + grain - 1) / grain * grain);
    add(*address, bytes, DEVICE);
    say("alloc %p %zu", *address, bytes);
    return cudaSuccess;
}

CALL cudaError_t cudaFree(void *address) { /* the address space stays taken: a use after free is not a crash */
    struct region was = find(address, 1);
    if (was.start) madvise(was.start, was.bytes, MADV_DONTNEED);
    pthread_mutex_lock(&lock);
    used[was.device] -= was.bytes;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

CALL cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    touch();
    *total = TOTAL;
    *free = TOTAL - CONTEXT - used[current];
    return cudaSuccess;
}

CALL cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    touch();
    if (posix_memalign(address, 4096, bytes ? bytes : 1)) return cudaErrorMemoryAllocation;
    add(*address, bytes, PINNED);
    say("pin %p %zu", *address, bytes);
    return cudaSuccess;
}

CALL cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    NOTED("pin %p %zu", address, bytes);
    add(address, bytes, PINNED);
    return cudaSuccess;
}

CALL cudaError_t cudaHostUnregister(void *address) { find(address, 1); return cudaSuccess; }
CALL cudaError_t cudaFreeHost(void *address) { find(address, 1); free(address); return cudaSuccess; }

CALL cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *of, const void *address) {
    struct region found = find(address, 0);
    *of = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
    if (!found.start) return cudaSuccess;
    of->type = found.kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    of->device = found.device;
    of->devicePointer = (void *)address;
    of->hostPointer = found.kind == PINNED ? (void *)address : 0;
    return cudaSuccess;
}

CALL cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    NOTED("copy %p %s %s %zu", stream, kinds[find(to, 0).kind], kinds[find(from, 0).kind], bytes);
    memcpy(to, from, bytes);
    return cudaSuccess;
}

CALL cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, 0);
}

CALL cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) {
    NOTED("fill %p %zu", stream, bytes);
    memset(address, value, bytes);
    return cudaSuccess;
}

/* -- devices */

CALL cudaError_t cudaGetDeviceCount(int *count) { *count = devices(); return cudaSuccess; }
CALL cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }

CALL cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return cudaErrorInvalidDevice;
    current = device;
    NOTED("use");
    return cudaSuccess;
}

CALL cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *of, int device) {
    *of = (struct cudaDeviceProp){
        .name = "NVIDIA H200 (fake)", .totalGlobalMem = TOTAL, .major = 9, .minor = 0, .warpSize = 32,
        .multiProcessorCount = 132, .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = 232448,
        .sharedMemPerMultiprocessor = 233472, .regsPerBlock = 65536, .regsPerMultiprocessor = 65536,
        .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048, .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535}, .maxBlocksPerMultiProcessor = 32, .l2CacheSize = 62914560,
        .totalConstMem = 65536, .textureAlignment = 512, .memoryBusWidth = 6144, .unifiedAddressing = 1,
        .concurrentKernels = 1, .asyncEngineCount = 3, .streamPrioritiesSupported = 1, .cooperativeLaunch = 1,
    };
    of->uuid.bytes[0] = device + 1;
    return cudaSuccess;
}

CALL cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr what, int device) {
    struct cudaDeviceProp of;
    cudaGetDeviceProperties(&of, device);
    switch (what) {
        case cudaDevAttrComputeCapabilityMajor: *value = of.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = of.minor; break;
        case cudaDevAttrMultiProcessorCount: *value = of.multiProcessorCount; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = of.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = of.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = of.sharedMemPerMultiprocessor; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = of.maxThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = of.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxGridDimX: *value = of.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = of.maxGridSize[1]; break;
        case cudaDevAttrWarpSize: *value = of.warpSize; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

CALL cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

CALL cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
CALL cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
CALL const char *cudaGetErrorString(cudaError_t error) { return "an error of the fake GPU"; }
CALL const char *cudaGetErrorName(cudaError_t error) { return "fakeError"; }

/* -- streams and events */

static void *handle(void) {
    static long last = 0x1000;
    return (void *)__sync_add_and_fetch(&last, 16);
}

CALL cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = handle();
    NOTED("stream %p", *stream);
    return cudaSuccess;
}

CALL cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
CALL cudaError_t cudaStreamSynchronize(cudaStream_t stream) { NOTED("sync-stream %p", stream); return cudaSuccess; }
CALL cudaError_t cudaDeviceSynchronize(void) { NOTED("sync-device"); return cudaSuccess; }
CALL cudaError_t cudaEventSynchronize(cudaEvent_t event) { NOTED("sync-event %p", event); return cudaSuccess; }

CALL cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    NOTED("wait %p %p", stream, event);
    return cudaSuccess;
}

CALL cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    NOTED("record %p %p", event, stream);
    return cudaSuccess;
}

CALL cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

CALL cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    touch();
    *event = handle();
    return cudaSuccess;
}

CALL cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
CALL cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { *ms = 1; return cudaSuccess; }
CALL cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }

CALL cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

CALL cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

CALL cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
        unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
        size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

/* -- kernels */

static __thread struct { dim3 grid, block; size_t shared; void *stream; } launch;

CALL void **__cudaRegisterFatBinary(void *binary) { static void *nothing; return &nothing; }
CALL cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return cudaSuccess; }

CALL unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    launch.grid = grid, launch.block = block, launch.shared = shared, launch.stream = stream;
    return 0;
}

CALL cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = launch.grid, *block = launch.block, *shared = launch.shared, *(void **)stream = launch.stream;
    return cudaSuccess;
}

CALL cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    NOTED("launch %p", stream);
    return cudaSuccess;
}

CALL cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **arguments) {
    NOTED("launch %p", how->stream);
    return cudaSuccess;
}

CALL cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *of, const void *kernel) {
    *of = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90};
    return cudaSuccess;
}

CALL cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
        size_t shared, unsigned flags) {
    *blocks = 1;
    return cudaSuccess;
}

/* -- the driver: torch asks it which devices have a context, to touch no other */

CALL int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = contexts[device];
    return 0;
}

CALL int cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }
static int nothing(void) { return 0; }

CALL cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
        unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    *function = (void *)nothing;
    if (!strcmp(name, "cuDevicePrimaryCtxGetState")) *function = (void *)cuDevicePrimaryCtxGetState;
    if (!strcmp(name, "cuCtxGetCurrent")) *function = (void *)cuCtxGetCurrent;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* -- libraries: handles, or torch takes what it finds for a failure */

CALL int cublasCreate_v2(void **made) { *made = handle(); return 0; }
CALL int cublasLtCreate(void **made) { *made = handle(); return 0; }
CALL int cublasGetPointerMode_v2(void *of, int *mode) { *mode = 0; return 0; }
CALL int cublasGetMathMode(void *of, int *mode) { *mode = 0; return 0; }

CALL int cublasLtMatmulAlgoGetHeuristic(void *of, void *a, void *b, void *c, void *d, void *e, void *f, int most,
        void *found, int *count) {
    *count = 1;
    return 0;
}

typedef struct { char bytes[128]; } unique_id;
CALL int ncclGetUniqueId(unique_id *id) { memset(id, 7, sizeof *id); return 0; }
CALL int ncclCommInitRank(void **made, int size, unique_id id, int rank) { touch(); *made = handle(); return 0; }

CALL int ncclCommInitRankConfig(void **made, int size, unique_id id, int rank, void *config) {
    return ncclCommInitRank(made, size, id, rank);
}

CALL int ncclCommSplit(void *of, int color, int key, void **made, void *config) { *made = handle(); return 0; }
CALL int ncclCommGetAsyncError(void *of, int *error) { *error = 0; return 0; }
