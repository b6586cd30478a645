/* The fake GPU: the functions of CUDA's runtime and driver and of other libraries whose results torch and Triton need.

   All other functions that torch calls do nothing and return 0 (build.py generates them). Memory on each device,
   page-locked memory, the current device of each thread and the devices with a context are recorded. Handles of streams
   and events are numbers. Copies and fills of up to 64 KiB are executed; larger ones are not. Kernels do nothing. Device
   memory is address space that is hardly ever backed by host memory.

   The log (FAKE_GPU_LOG, appended to) has one line per call: thread, its current device, name, arguments. Names:
     context               the first call that needs a context on this device, for which the driver allocates memory
     use                   cudaSetDevice, which also creates a context
     alloc ADDRESS BYTES   an allocation of the driver; torch's caching allocator often needs none
     pin ADDRESS BYTES     an allocation of page-locked memory
     launch STREAM         a kernel, also one of Triton (cuBLAS and cuDNN get their stream earlier and are not logged)
     copy STREAM TO FROM BYTES   TO and FROM: device, pinned or host
     fill STREAM BYTES
     stream STREAM         a stream is created
     record EVENT STREAM
     wait STREAM EVENT     the stream waits, not the host
     sync-stream STREAM, sync-event EVENT, sync-device     the host waits
     all-reduce, all-gather, reduce-scatter COUNT TYPE STREAM   NCCL; COUNT: elements that a rank sends or receives
     note TEXT             a note of the program (fake_gpu_note)
   Stream 0 is the default stream of the line's device. */

#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cudnn_backend.h>
#include <dlfcn.h>
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
#define TOTAL_MEMORY (143771 * MEGABYTE) /* as nvidia-smi shows for an H200 */
#define CONTEXT_MEMORY (600 * MEGABYTE)
#define REGIONS (1 << 16)
#define MAX_COPY_BYTES (64u << 10) /* bytes; larger copies and fills are not executed */

enum { UNKNOWN, DEVICE, PINNED };
static const char *kind_names[] = {"host", "device", "pinned"};
static struct region { char *start; size_t bytes; int kind, device; } regions[REGIONS];
static int region_count;
static size_t used_memory[DEVICES];
static int has_context[DEVICES];
static __thread int current_device;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int device_count(void) {
    char *count = getenv("FAKE_GPUS");
    return count ? atoi(count) : 1;
}

/* Append a line to the log: the thread, its current device, and the text. Do nothing without FAKE_GPU_LOG. */
static void write_log(const char *format, ...) {
    static int file = -2;
    char line[512];
    if (file == -2) {
        char *path = getenv("FAKE_GPU_LOG");
        file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    }
    if (file < 0) return;
    int length = snprintf(line, sizeof line, "%d %d ", gettid(), current_device);
    va_list arguments;
    va_start(arguments, format);
    length += vsnprintf(line + length, sizeof line - length - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    if (write(file, line, length) != length) abort(); /* one write per line, so that lines of threads do not mix */
}

/* Create a context on the current device if it has none. Each function that needs a context calls this first. */
static void ensure_context(void) {
    pthread_mutex_lock(&lock);
    int is_new = !has_context[current_device];
    has_context[current_device] = 1;
    pthread_mutex_unlock(&lock);
    if (is_new) write_log("context");
}

/* Log a call that needs a context. */
#define LOG_IN_CONTEXT(...) do { ensure_context(); write_log(__VA_ARGS__); } while (0)

CALL void fake_gpu_note(const char *text) { write_log("note %s", text); }

/* -- memory */

/* Record an allocation on the current device. */
static void add_region(void *start, size_t bytes, int kind) {
    pthread_mutex_lock(&lock);
    int index = 0;
    while (index < region_count && regions[index].start) index++;
    if (index == REGIONS) abort();
    if (index == region_count) region_count++;
    regions[index] = (struct region){start, bytes, kind, current_device};
    pthread_mutex_unlock(&lock);
}

/* Return the allocation that contains an address, and remove it from the record if `should_remove` is set. Return
   zeros if no allocation contains the address, for example if it is ordinary host memory. */
static struct region find_region(const void *address, int should_remove) {
    struct region region = {0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < region_count; i++) {
        char *start = regions[i].start;
        if (!start || (char *)address < start || (char *)address >= start + regions[i].bytes) continue;
        region = regions[i];
        if (should_remove) regions[i].start = 0;
        break;
    }
    pthread_mutex_unlock(&lock);
    return region;
}

CALL cudaError_t cudaMalloc(void **address, size_t bytes) {
    ensure_context();
    pthread_mutex_lock(&lock);
    int fits = used_memory[current_device] + bytes + CONTEXT_MEMORY <= TOTAL_MEMORY;
    if (fits) used_memory[current_device] += bytes;
    pthread_mutex_unlock(&lock);
    *address = 0;
    if (!fits) return cudaErrorMemoryAllocation;
    size_t alignment = 2 * MEGABYTE; /* as CUDA aligns large allocations; torch relies on this */
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *start = mmap(0, bytes + 2 * alignment, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (start == MAP_FAILED) return cudaErrorMemoryAllocation;
    *address = (void *)(((size_t)start + alignment - 1) / alignment * alignment);
    add_region(*address, bytes, DEVICE);
    write_log("alloc %p %zu", *address, bytes);
    return cudaSuccess;
}

CALL cudaError_t cudaFree(void *address) { /* the address space stays mapped, so that a use after free does not crash */
    struct region region = find_region(address, 1);
    if (region.start) madvise(region.start, region.bytes, MADV_DONTNEED);
    pthread_mutex_lock(&lock);
    used_memory[region.device] -= region.bytes;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

CALL cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    ensure_context();
    *total = TOTAL_MEMORY;
    *free = TOTAL_MEMORY - CONTEXT_MEMORY - used_memory[current_device];
    return cudaSuccess;
}

CALL cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    ensure_context();
    if (posix_memalign(address, 4096, bytes ? bytes : 1)) return cudaErrorMemoryAllocation;
    add_region(*address, bytes, PINNED);
    write_log("pin %p %zu", *address, bytes);
    return cudaSuccess;
}

CALL cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    LOG_IN_CONTEXT("pin %p %zu", address, bytes);
    add_region(address, bytes, PINNED);
    return cudaSuccess;
}

CALL cudaError_t cudaHostUnregister(void *address) { find_region(address, 1); return cudaSuccess; }
CALL cudaError_t cudaFreeHost(void *address) { find_region(address, 1); free(address); return cudaSuccess; }

CALL cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    struct region region = find_region(address, 0);
    *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
    if (!region.start) return cudaSuccess;
    attributes->type = region.kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = region.device;
    attributes->devicePointer = (void *)address;
    attributes->hostPointer = region.kind == PINNED ? (void *)address : 0;
    return cudaSuccess;
}

CALL cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    const char *to_kind = kind_names[find_region(to, 0).kind];
    const char *from_kind = kind_names[find_region(from, 0).kind];
    LOG_IN_CONTEXT("copy %p %s %s %zu", stream, to_kind, from_kind, bytes);
    if (bytes <= MAX_COPY_BYTES) memmove(to, from, bytes);
    return cudaSuccess;
}

CALL cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, 0);
}

CALL cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) {
    LOG_IN_CONTEXT("fill %p %zu", stream, bytes);
    if (bytes <= MAX_COPY_BYTES) memset(address, value, bytes);
    return cudaSuccess;
}

/* -- devices */

CALL cudaError_t cudaGetDeviceCount(int *count) { *count = device_count(); return cudaSuccess; }
CALL cudaError_t cudaGetDevice(int *device) { *device = current_device; return cudaSuccess; }

CALL cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    current_device = device;
    LOG_IN_CONTEXT("use");
    return cudaSuccess;
}

CALL cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    *properties = (struct cudaDeviceProp){
        .name = "NVIDIA H200 (fake)", .totalGlobalMem = TOTAL_MEMORY, .major = 9, .minor = 0, .warpSize = 32,
        .multiProcessorCount = 132, .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = 232448,
        .sharedMemPerMultiprocessor = 233472, .regsPerBlock = 65536, .regsPerMultiprocessor = 65536,
        .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048, .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535}, .maxBlocksPerMultiProcessor = 32, .l2CacheSize = 62914560,
        .totalConstMem = 65536, .textureAlignment = 512, .memoryBusWidth = 6144, .unifiedAddressing = 1,
        .concurrentKernels = 1, .asyncEngineCount = 3, .streamPrioritiesSupported = 1, .cooperativeLaunch = 1,
    };
    properties->uuid.bytes[0] = device + 1;
    return cudaSuccess;
}

CALL cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, device);
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
        case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = properties.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = properties.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = properties.sharedMemPerMultiprocessor; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = properties.maxGridSize[1]; break;
        case cudaDevAttrWarpSize: *value = properties.warpSize; break;
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

/* Return a number that no other handle has. */
static void *new_handle(void) {
    static long last = 0x1000;
    return (void *)__sync_add_and_fetch(&last, 16);
}

CALL cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = new_handle();
    LOG_IN_CONTEXT("stream %p", *stream);
    return cudaSuccess;
}

CALL cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
CALL cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    LOG_IN_CONTEXT("sync-stream %p", stream);
    return cudaSuccess;
}

CALL cudaError_t cudaDeviceSynchronize(void) { LOG_IN_CONTEXT("sync-device"); return cudaSuccess; }

CALL cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    LOG_IN_CONTEXT("sync-event %p", event);
    return cudaSuccess;
}

CALL cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    LOG_IN_CONTEXT("wait %p %p", stream, event);
    return cudaSuccess;
}

CALL cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    LOG_IN_CONTEXT("record %p %p", event, stream);
    return cudaSuccess;
}

CALL cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

CALL cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    ensure_context();
    *event = new_handle();
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

CALL void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
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
    LOG_IN_CONTEXT("launch %p", stream);
    return cudaSuccess;
}

CALL cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    LOG_IN_CONTEXT("launch %p", config->stream);
    return cudaSuccess;
}

CALL cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90
    };
    return cudaSuccess;
}

CALL cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
        size_t shared, unsigned flags) {
    *blocks = 1;
    return cudaSuccess;
}

/* -- the driver: torch asks it which devices have a context; Triton launches its kernels with it */

CALL CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = has_context[device];
    return CUDA_SUCCESS;
}

CALL CUresult cuCtxGetCurrent(CUcontext *context) { *context = (void *)16; return CUDA_SUCCESS; }
CALL CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }
CALL CUresult cuCtxGetDevice(CUdevice *device) { *device = current_device; return CUDA_SUCCESS; }
CALL CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CALL CUresult cuDeviceGetCount(int *count) { *count = device_count(); return CUDA_SUCCESS; }
CALL CUresult cuDriverGetVersion(int *version) { *version = CUDART_VERSION; return CUDA_SUCCESS; }
CALL CUresult cuGetErrorString(CUresult error, const char **text) { *text = "fake"; return CUDA_SUCCESS; }
CALL CUresult cuModuleLoadData(CUmodule *module, const void *binary) { *module = new_handle(); return CUDA_SUCCESS; }
CALL CUresult cuModuleLoad(CUmodule *module, const char *file) { *module = new_handle(); return CUDA_SUCCESS; }

CALL CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = new_handle();
    return CUDA_SUCCESS;
}

CALL CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    /* the runtime and the driver use the same numbers for attributes */
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}

CALL CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
        : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
    return CUDA_SUCCESS;
}

CALL CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    *(CUdeviceptr *)value = address;
    return CUDA_SUCCESS;
}

CALL CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    LOG_IN_CONTEXT("launch %p", config->hStream);
    return CUDA_SUCCESS;
}

CALL CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
        unsigned threads_y, unsigned threads_z, unsigned shared, CUstream stream, void **arguments, void **extra) {
    LOG_IN_CONTEXT("launch %p", stream);
    return CUDA_SUCCESS;
}

static int do_nothing(void) { return 0; }

CALL cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
        unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = (void *)do_nothing;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* -- libraries: nonzero handles, because torch considers 0 a failure */

CALL cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) { *handle = new_handle(); return CUDNN_STATUS_SUCCESS; }

CALL cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *handle) {
    *handle = new_handle();
    return CUDNN_STATUS_SUCCESS;
}

/* One engine for every graph, without workspace: the workspaces of cuDNN's real kernels are unknown. */
CALL cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
        cudnnBackendAttributeType_t type, int64_t max_count, int64_t *count, void *values) {
    int has_value = name == CUDNN_ATTR_ENGINEHEUR_RESULTS || name == CUDNN_ATTR_ENGINECFG_ENGINE
        || name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE;
    if (count) *count = has_value;
    if (values && type == CUDNN_TYPE_INT64) *(int64_t *)values = 0;
    if (values && type == CUDNN_TYPE_INT32) *(int32_t *)values = 0;
    return CUDNN_STATUS_SUCCESS;
}

CALL int cublasCreate_v2(void **handle) { *handle = new_handle(); return 0; }
CALL int cublasLtCreate(void **handle) { *handle = new_handle(); return 0; }
CALL int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
CALL int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }

CALL int cublasLtMatmulAlgoGetHeuristic(void *handle, void *a, void *b, void *c, void *d, void *e, void *f,
        int max_count, void *algorithms, int *count) {
    *count = 1;
    return 0;
}

typedef struct { char bytes[128]; } unique_id;
CALL int ncclGetUniqueId(unique_id *id) { memset(id, 7, sizeof *id); return 0; }

CALL int ncclCommInitRank(void **handle, int size, unique_id id, int rank) {
    ensure_context();
    *handle = new_handle();
    return 0;
}

CALL int ncclCommInitRankConfig(void **handle, int size, unique_id id, int rank, void *config) {
    return ncclCommInitRank(handle, size, id, rank);
}

CALL int ncclCommSplit(void *communicator, int color, int key, void **handle, void *config) {
    *handle = new_handle();
    return 0;
}

CALL int ncclCommGetAsyncError(void *communicator, int *error) { *error = 0; return 0; }

static void log_collective(const char *name, size_t count, int type, void *stream) {
    static const char *types[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "fp16", "fp32", "fp64", "bf16"};
    LOG_IN_CONTEXT("%s %zu %s %p", name, count, type < 10 ? types[type] : "fp8", stream);
}

CALL int ncclAllReduce(void *from, void *to, size_t count, int type, int operation, void *group, void *stream) {
    log_collective("all-reduce", count, type, stream);
    return 0;
}

CALL int ncclAllGather(void *from, void *to, size_t count, int type, void *group, void *stream) {
    log_collective("all-gather", count, type, stream);
    return 0;
}

CALL int ncclReduceScatter(void *from, void *to, size_t count, int type, int operation, void *group, void *stream) {
    log_collective("reduce-scatter", count, type, stream);
    return 0;
}
