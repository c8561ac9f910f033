// A phantom GPU: the calls of libcudart, libcublas, libcublasLt, libnccl, libcuda and libnvidia-ml on a machine without a driver.
// It says nothing of values: kernels and matrix products compute nothing. Loaded before those libraries (LD_PRELOAD), it makes
// torch's CUDA build see GPUs, so that its dispatcher, caching allocator, streams and process groups run.
//   PHANTOM_GPU_MEMORY      bytes of each GPU (80 GiB)        PHANTOM_GPU_DEVICES     number of GPUs (1)
//   PHANTOM_GPU_CAPABILITY  90 for 9.0                        PHANTOM_GPU_COPY_LIMIT  largest copy that is carried out (1 MiB)
//   PHANTOM_GPU_CONTEXT     bytes that a context takes (500 MiB)  CUDA_VISIBLE_DEVICES  numbers of the GPUs that the process uses
//   PHANTOM_GPU_USE         folder in which each process writes the bytes that it has on each GPU
//   PHANTOM_GPU_HOST_LIMIT  largest block of host memory that has values (no limit)
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <search.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
// A call that does nothing. The header's prototype of the same symbol may have parameters.
#define SUCCEED(name) \
    API int succeed_##name(void) __asm__(#name); \
    int succeed_##name(void) { return 0; }

typedef int status;  // cudaError_t, cublasStatus_t, ncclResult_t and CUresult: 0 is success
enum { OUT_OF_MEMORY = 2, INVALID_VALUE = 1, INVALID_CONFIGURATION = 9, INVALID_DEVICE = 101, NOT_FOUND = 500 };

enum counter { LAUNCHES, PRODUCTS, TO_DEVICE, TO_HOST, ON_DEVICE, SYNCS, COLLECTIVES, ALLOCATIONS, GRAPHS, SHARES, OPENINGS, CLOSINGS, TO_PAGEABLE, NUM_COUNTERS };
static unsigned long counters[NUM_COUNTERS];
static void count(enum counter c) { __atomic_add_fetch(&counters[c], 1, __ATOMIC_RELAXED); }
API const unsigned long *phantom_gpu_counters(int *n) { *n = NUM_COUNTERS; return counters; }

static size_t setting(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, 0, 10) : otherwise;
}
static void *new_handle(void) {  // handle of a stream, event, module or other object without a state
    static uintptr_t last = 0x1000;
    return (void *)__atomic_add_fetch(&last, 16, __ATOMIC_RELAXED);
}

#include "visible.h"
#include "memory.h"
#include "host.h"
#include "device.h"
#include "streams.h"
#include "sharing.h"
#include "launches.h"
#include "blas.h"
#include "nccl.h"
#include "driver.h"
#include "virtual.h"
#include "nvml.h"
