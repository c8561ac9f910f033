// Memory of the host: pinned blocks, and large blocks without values.
//
// A block above PHANTOM_GPU_HOST_LIMIT, pinned or of torch's CPU allocator, is address space whose pages all map one small file
// again and again. Its bytes are counted, and take no memory when they are written. All such blocks have the same values, which
// mean nothing: no large copy from a phantom GPU is carried out either.
#define WINDOW ((size_t)16 << 20)  // bytes of the file: they fit a CPU's cache, and 64 GiB need few mappings (vm.max_map_count)
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

API size_t phantom_gpu_pinned(void) { return on_host[1]; }
API size_t phantom_gpu_pageable(void) { return on_host[0]; }  // without blocks that have values
static size_t host_limit(void) { return setting("PHANTOM_GPU_HOST_LIMIT", (size_t)-1); }  // a fork may have another one
static int has_values(size_t size) { return size <= host_limit(); }
static int make_window(void) {
    int file = memfd_create("phantom host memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, WINDOW)) return -1;
    char *start = mmap(0, 2 * WINDOW, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return -1;
    char *aligned = (char *)(((uintptr_t)start + GRANULARITY - 1) & ~(GRANULARITY - 1));
    if (mmap(aligned, WINDOW, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) return -1;
    memset(aligned, 0, WINDOW);
    madvise(aligned, WINDOW, MADV_COLLAPSE);  // Linux 6.1: a page fault per 2 MiB of a block, not per 4 KiB
    munmap(start, 2 * WINDOW);
    return file;
}
static void *map_shared_pages(size_t size) {  // with the lock; aligned to GRANULARITY
    static int file = -1;
    if (file < 0 && (file = make_window()) < 0) return MAP_FAILED;
    char *start = mmap(0, size + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return MAP_FAILED;
    char *aligned = (char *)(((uintptr_t)start + GRANULARITY - 1) & ~(GRANULARITY - 1)), *end = start + size + GRANULARITY;
    if (aligned > start) munmap(start, aligned - start);
    if (end > aligned + size) munmap(aligned + size, end - (aligned + size));
    for (size_t i = 0; i < size; i += WINDOW) {
        size_t n = size - i < WINDOW ? size - i : WINDOW;
        if (mmap(aligned + i, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
            munmap(aligned, size);
            return MAP_FAILED;
        }
    }
    return aligned;
}

// ---- torch's CPU allocator -------------------------------------------------------------------------------------------
typedef int (*allocator)(void **, size_t, size_t);
typedef void (*deallocator)(void *);
API int posix_memalign(void **out, size_t alignment, size_t size) {
    static allocator next;
    if (!has_values(size)) {
        void *start;
        if (reserve(&start, size, PAGEABLE)) return 12;  // ENOMEM
        *out = start;
        return 0;
    }
    if (!next) next = (allocator)dlsym(RTLD_NEXT, "posix_memalign");
    return next(out, alignment, size);
}
static int is_shared_block(const void *p) {
    if (!p || !on_host[0] || (uintptr_t)p & (GRANULARITY - 1)) return 0;
    pthread_mutex_lock(&lock);
    block *b = block_at(blocks, p);
    pthread_mutex_unlock(&lock);
    return b && b->start == p && b->owner == PAGEABLE;
}
API void free(void *p) {
    static deallocator next;
    if (is_shared_block(p)) {
        remove_block(p, 0);
        return;
    }
    if (!next) next = (deallocator)dlsym(RTLD_NEXT, "free");
    next(p);
}

// ---- pinned memory ---------------------------------------------------------------------------------------------------
API cudaError_t cudaHostAlloc(void **out, size_t n, unsigned flags) { return reserve(out, n, PINNED); }
API cudaError_t cudaMallocHost(void **out, size_t n) { return reserve(out, n, PINNED); }
API cudaError_t cudaFreeHost(void *p) { return release(p); }
API cudaError_t cudaHostGetDevicePointer(void **out, void *p, unsigned flags) { *out = p; return 0; }
API cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags) {
    pthread_mutex_lock(&lock);
    block *known = owned_block(p), *new = known && known->owner != PAGEABLE ? 0 : malloc(sizeof *new);
    if (new) {
        *new = (block){p, n, REGISTERED, -1, 0};
        add_block(&registered, new);
        on_host[1] += n;
    }
    pthread_mutex_unlock(&lock);
    return new ? 0 : (last_error = cudaErrorHostMemoryAlreadyRegistered);
}
API cudaError_t cudaHostUnregister(void *p) {
    pthread_mutex_lock(&lock);
    block *b = block_at(registered, p);
    int is_known = b && b->start == p;
    if (is_known) {
        on_host[1] -= b->size;
        drop_block(&registered, b);
    }
    pthread_mutex_unlock(&lock);
    return is_known ? 0 : (last_error = cudaErrorHostMemoryNotRegistered);
}
