/* The threads, the barrier between them, and the loop over the instructions of a tape. */
#define _GNU_SOURCE
#include "native.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#else
#include <sched.h>
#endif

#define SPINS 4000 /* some tens of microseconds: longer than any serial part of a token, shorter than one is noticed */

enum { END, BARRIER, ELEMENT, COPY, REDUCE, SOFTMAX, PRODUCT, QUANTISE, LINEAR8, LINEAR_FLOAT, SPAN, ATTENTION, PACK8,
       PACK_FLOAT, NORM, ROTATE, READ, KINDS };

static Kernel *const KERNELS[KINDS] = {
    [ELEMENT] = run_element, [COPY] = run_copy, [REDUCE] = run_reduce, [SOFTMAX] = run_softmax,
    [PRODUCT] = run_product, [QUANTISE] = run_quantise, [LINEAR8] = run_linear8, [LINEAR_FLOAT] = run_linear_float,
    [SPAN] = run_span, [ATTENTION] = run_attention, [PACK8] = run_pack8, [PACK_FLOAT] = run_pack_float,
    [NORM] = run_norm, [ROTATE] = run_rotate, [READ] = run_read,
};

typedef struct {
    int threads;
    pid_t owner; /* a forked child has the memory and none of the threads */
    pthread_mutex_t lock;
    atomic_int arrived, phase, sleepers;
    const int64_t *tape;
    char *const *slots;
    char **scratch;
    size_t scratch_bytes;
} Pool;

static Pool pool = {1, 0, PTHREAD_MUTEX_INITIALIZER, 0, 0, 0, NULL, NULL, NULL, 0};

static void sleep_while(atomic_int *place, int value) {
#ifdef __linux__
    atomic_fetch_add_explicit(&pool.sleepers, 1, memory_order_seq_cst);
    syscall(SYS_futex, (int *)place, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
    atomic_fetch_sub_explicit(&pool.sleepers, 1, memory_order_seq_cst);
#else
    (void)place, (void)value;
    sched_yield();
#endif
}

static void barrier(int threads) {
    if (threads == 1) return;
    int phase = atomic_load_explicit(&pool.phase, memory_order_acquire);
    if (atomic_fetch_add_explicit(&pool.arrived, 1, memory_order_acq_rel) == threads - 1) {
        atomic_store_explicit(&pool.arrived, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&pool.phase, 1, memory_order_seq_cst);
#ifdef __linux__
        if (atomic_load_explicit(&pool.sleepers, memory_order_seq_cst))
            syscall(SYS_futex, (int *)&pool.phase, FUTEX_WAKE_PRIVATE, threads, NULL, NULL, 0);
#endif
        return;
    }
    for (int spins = 0; atomic_load_explicit(&pool.phase, memory_order_acquire) == phase;)
        if (spins < SPINS) {
            spins++;
            _mm_pause();
        } else
            sleep_while(&pool.phase, phase);
}

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Serial instructions are thread 0's; where the others must not run ahead, the tape has a barrier. What thread 0 takes
   for the i-th instruction is added to times[i], unless that is NULL. */
static void run_tape(const int64_t *tape, const Run *run, int64_t *times) {
    int64_t before = times ? nanoseconds() : 0;
    for (const int64_t *w = tape;; w += w[1]) {
        if (w[0] == END) return;
        if (w[0] == BARRIER)
            barrier(run->threads);
        else if (w[2] || run->thread == 0) {
            Run alone = {run->slots, 0, 1, run->scratch};
            KERNELS[w[0]](w[2] ? run : &alone, w + 3);
        }
        if (times) {
            int64_t now = nanoseconds();
            *times++ += now - before;
            before = now;
        }
    }
}

static void *work(void *number) {
    int thread = (int)(intptr_t)number;
    for (;;) {
        barrier(pool.threads);
        Run run = {pool.slots, thread, pool.threads, pool.scratch[thread]};
        run_tape(pool.tape, &run, NULL);
        barrier(pool.threads);
    }
    return NULL;
}

/* 1 where the processor has what the kernels use. */
int anechain_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

/* Makes room of `scratch_bytes` for each thread and, the first time, the threads themselves. Returns how many there
   are, which is `threads` unless others were made before or the system gives fewer. 0: there is no memory. */
int anechain_prepare(int threads, size_t scratch_bytes) {
    pthread_mutex_lock(&pool.lock);
    int first = pool.scratch == NULL;
    if (first) pool.scratch = calloc((size_t)threads, sizeof(char *));
    int count = first ? threads : pool.threads, whole = pool.scratch != NULL;
    if (whole && scratch_bytes > pool.scratch_bytes) {
        for (int i = 0; i < count; i++) {
            free(pool.scratch[i]);
            pool.scratch[i] = aligned_alloc(64, (scratch_bytes + 63) / 64 * 64);
            whole = whole && pool.scratch[i] != NULL;
        }
        pool.scratch_bytes = whole ? scratch_bytes : 0;
    }
    if (whole && first) {
        pool.owner = getpid();
        pool.threads = threads;
        for (int i = 1; i < threads; i++) {
            pthread_t id;
            if (pthread_create(&id, NULL, work, (void *)(intptr_t)i) != 0) abort(); /* no half of a barrier */
            pthread_detach(id);
        }
    }
    pthread_mutex_unlock(&pool.lock);
    return whole ? pool.threads : 0;
}

/* Runs a tape on all threads and returns when it is done. Callers take turns. `times`: see run_tape. */
void anechain_run(const int64_t *tape, char *const *slots, int64_t *times) {
    pthread_mutex_lock(&pool.lock);
    if (pool.threads == 1 || pool.owner != getpid()) {
        Run run = {slots, 0, 1, pool.scratch[0]};
        run_tape(tape, &run, times);
    } else {
        pool.tape = tape;
        pool.slots = slots;
        barrier(pool.threads);
        Run run = {slots, 0, pool.threads, pool.scratch[0]};
        run_tape(tape, &run, times);
        barrier(pool.threads);
    }
    pthread_mutex_unlock(&pool.lock);
}
