/* A GPU that holds memory and copies it, and computes nothing: what torch asks of CUDA besides kernels, preloaded where
   there is no GPU. Device memory is host memory, copies are done at once, and streams and events have nothing to wait
   for. A kernel is not run, and reported as launched. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DONE { return 0; }
static int allocate(void **memory, size_t bytes) {
    *memory = aligned_alloc(512, (bytes + 511) / 512 * 512);
    return *memory ? 0 : 2; /* cudaErrorMemoryAllocation */
}
static int handle(void **handle) { static uintptr_t last; *handle = (void *)(++last << 8); return 0; }

int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) DONE
int cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return 0; }
int cudaDeviceSynchronize(void) DONE
int cudaGetLastError(void) DONE
int cudaPeekAtLastError(void) DONE
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }

int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, uint64_t flags, int *status) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : 500; /* cudaErrorSymbolNotFound */
}

/* The fields that the choice of an attention kernel reads lie at the same place in CUDA 12 and 13. */
int cudaGetDeviceProperties_v2(char *properties, int device) {
    int capability = atoi(getenv("NULL_CUDA_CAPABILITY"));
    memset(properties, 0, 1008);
    *(int *)(properties + 360) = capability / 10;
    *(int *)(properties + 364) = capability % 10;
    return 0;
}
int cudaGetDeviceProperties(char *properties, int device) { return cudaGetDeviceProperties_v2(properties, device); }

int cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = (size_t)1 << 36; return 0; }
int cudaMalloc(void **memory, size_t bytes) { return allocate(memory, bytes); }
int cudaHostAlloc(void **memory, size_t bytes, unsigned flags) { return allocate(memory, bytes); }
int cudaFree(void *memory) { free(memory); return 0; }
int cudaFreeHost(void *memory) { free(memory); return 0; }
int cudaPointerGetAttributes(int *attributes, const void *memory) {
    memset(attributes, 0, 32);
    attributes[0] = 1; /* cudaMemoryTypeHost: asked of page-locked memory alone */
    return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    memcpy(to, from, bytes);
    return 0;
}
int cudaMemsetAsync(void *memory, int value, size_t bytes, void *stream) { memset(memory, value, bytes); return 0; }

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return handle(stream); }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamQuery(void *stream) DONE
int cudaStreamSynchronize(void *stream) DONE
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) DONE
int cudaEventCreateWithFlags(void **event, unsigned flags) { return handle(event); }
int cudaEventDestroy(void *event) DONE
int cudaEventRecord(void *event, void *stream) DONE
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) DONE
int cudaEventQuery(void *event) DONE
int cudaEventSynchronize(void *event) DONE
int cudaEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 1; return 0; }
int cudaEventElapsedTime_v2(float *milliseconds, void *start, void *end) { *milliseconds = 1; return 0; }
