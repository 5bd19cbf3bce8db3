/* The skinny matrix product of the verification pass: out[M][N] = x[M][K] * weights[N][K]^T + bias, few rows, float32 sums.

   A Python extension without NumPy or PyTorch headers: tensors arrive as addresses. The caller checks shapes. */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum { PANEL = 32, HALF = PANEL / 2, MOST_ROWS = 48, DEPTH = 256, AHEAD = 128 }; /* of the matrix product */
enum { ATTEND_ROWS = 12 }; /* of attention */
enum { SILU = 0, GELU_TANH = 1 }; /* of a gated MLP */

struct linear {
    const float *x;
    const void *weights;
    const float *bias;
    float *out;
    long M, N, K;
    int type;
};

struct attention {
    const float *q, *keys, *values; /* [heads][n][key_size], [kv_heads][m][key_size], [kv_heads][m][value_size] */
    const float *mask, *sinks;      /* [n][mask_columns] for the last columns, [heads]; or NULL */
    float *out;                     /* [n][heads][value_size] */
    long heads, kv_heads, n, m, key_size, value_size, mask_columns;
    long q_head_stride, q_row_stride, key_stride, value_stride;
    float scaling;
};

#if defined(__x86_64__)
#define VARIANT(name) name##_avx512
#define W 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23 /* two vectors' lower halves, in turns */
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define ROWS 12
#define PAIRS 1
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#include "_skinny.h"

#define VARIANT(name) name##_avx2
#define W 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11 /* two vectors' lower halves, in turns */
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define ROWS 6
#define PAIRS 1
#define TARGET __attribute__((target("avx2,fma")))
#include "_skinny.h"
#endif

#define VARIANT(name) name##_portable /* on ARM this is NEON, which every 64-bit ARM has */
#define W 4
#define LOW 0, 4, 1, 5 /* two vectors' lower halves, in turns */
#define HIGH 2, 6, 3, 7
#if defined(__aarch64__)
#define ROWS 6
#define PAIRS 2
#else
#define ROWS 4
#define PAIRS 1
#endif
#define TARGET
#include "_skinny.h"

static const struct {
    const char *name;
    void (*linear)(const struct linear *, long panel);
    void (*attend)(const struct attention *, long kv_head, long first, long rows, float *scores);
    void (*gated)(const struct linear *, const void *up, int activation, long panel);
    void (*norm)(const float *x, const float *weight, float *out, long size, float epsilon);
} variants[] = {
#if defined(__x86_64__)
    {"avx512", linear_avx512, attend_avx512, gated_avx512, norm_avx512},
    {"avx2", linear_avx2, attend_avx2, gated_avx2, norm_avx2},
#endif
#if defined(__aarch64__)
    {"neon", linear_portable, attend_portable, gated_portable, norm_portable},
#else
    {"portable", linear_portable, attend_portable, gated_portable, norm_portable},
#endif
};
enum { VARIANTS = sizeof variants / sizeof variants[0] };

static int usable(int index)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (variants[index].linear == linear_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
    if (variants[index].linear == linear_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    (void)index;
    return 1;
}

static PyObject *list_variants(PyObject *self, PyObject *none)
{
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < VARIANTS; i++)
        if (usable(i)) {
            PyObject *name = Py_BuildValue("si", variants[i].name, i);
            if (!name || PyList_Append(names, name))
                return NULL;
            Py_DECREF(name);
        }
    return names;
}

static PyObject *linear(PyObject *self, PyObject *args)
{
    unsigned long long x, weights, bias, out;
    long M, N, K;
    int type, which, threads;
    if (!PyArg_ParseTuple(args, "KKKKllliii", &x, &weights, &bias, &out, &M, &N, &K, &type, &which, &threads))
        return NULL;
    if (which < 0 || which >= VARIANTS || !usable(which))
        return PyErr_Format(PyExc_ValueError, "variant %d cannot run on this processor", which);
    struct linear p = {(const float *)(uintptr_t)x, (const void *)(uintptr_t)weights, (const float *)(uintptr_t)bias,
                       (float *)(uintptr_t)out, M, N, K, type};
    long panels = (N + PANEL - 1) / PANEL;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && panels > 1)
    for (long panel = 0; panel < panels; panel++)
        variants[which].linear(&p, panel);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *gated(PyObject *self, PyObject *args)
{
    unsigned long long x, gate, up, out;
    long M, N, K;
    int type, activation, which, threads;
    if (!PyArg_ParseTuple(args, "KKKKllliiii", &x, &gate, &up, &out, &M, &N, &K, &type, &activation, &which, &threads))
        return NULL;
    if (which < 0 || which >= VARIANTS || !usable(which))
        return PyErr_Format(PyExc_ValueError, "variant %d cannot run on this processor", which);
    struct linear p = {(const float *)(uintptr_t)x, (const void *)(uintptr_t)gate, NULL, (float *)(uintptr_t)out, M, N, K, type};
    long panels = (N + PANEL - 1) / PANEL;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && panels > 1)
    for (long panel = 0; panel < panels; panel++)
        variants[which].gated(&p, (const void *)(uintptr_t)up, activation, panel);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *norm(PyObject *self, PyObject *args)
{
    unsigned long long x, weight, out;
    long M, N;
    float epsilon;
    int which;
    if (!PyArg_ParseTuple(args, "KKKllfi", &x, &weight, &out, &M, &N, &epsilon, &which))
        return NULL;
    if (which < 0 || which >= VARIANTS || !usable(which))
        return PyErr_Format(PyExc_ValueError, "variant %d cannot run on this processor", which);
    for (long row = 0; row < M; row++)
        variants[which].norm((const float *)(uintptr_t)x + row * N, (const float *)(uintptr_t)weight, (float *)(uintptr_t)out + row * N, N, epsilon);
    Py_RETURN_NONE;
}

static PyObject *attend(PyObject *self, PyObject *args)
{
    unsigned long long q, keys, values, mask, sinks, out;
    struct attention p;
    int which, threads, failed = 0;
    if (!PyArg_ParseTuple(args, "KKKKKKlllllllllllfii", &q, &keys, &values, &mask, &sinks, &out, &p.heads, &p.kv_heads, &p.n, &p.m,
                          &p.key_size, &p.value_size, &p.mask_columns, &p.q_head_stride, &p.q_row_stride, &p.key_stride,
                          &p.value_stride, &p.scaling, &which, &threads))
        return NULL;
    if (which < 0 || which >= VARIANTS || !usable(which))
        return PyErr_Format(PyExc_ValueError, "variant %d cannot run on this processor", which);
    p.q = (const float *)(uintptr_t)q, p.keys = (const float *)(uintptr_t)keys, p.values = (const float *)(uintptr_t)values;
    p.mask = (const float *)(uintptr_t)mask, p.sinks = (const float *)(uintptr_t)sinks, p.out = (float *)(uintptr_t)out;
    long rows = p.heads / p.kv_heads * p.n, parts = (threads + p.kv_heads - 1) / p.kv_heads; /* of the rows of one key-value head */
    if (parts > rows)
        parts = rows;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : failed) if (threads > 1 && p.m * rows > 512)
    for (long task = 0; task < p.kv_heads * parts; task++) {
        long begin = task % parts * rows / parts, end = (task % parts + 1) * rows / parts;
        float *scores = malloc(ATTEND_ROWS * (p.m + 16) * sizeof(float));
        if (!scores) {
            failed = 1;
            continue;
        }
        for (long first = begin; first < end; first += ATTEND_ROWS)
            variants[which].attend(&p, task / parts, first, end - first < ATTEND_ROWS ? end - first : ATTEND_ROWS, scores);
        free(scores);
    }
    Py_END_ALLOW_THREADS
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* weights[N][K] -> packed[ceil(N / PANEL)][K][PANEL], missing outputs zero; `size` bytes an element. With 2 bytes, outputs c and
   c + HALF of a panel stand side by side. */
static PyObject *pack(PyObject *self, PyObject *args)
{
    unsigned long long from, to;
    long N, K;
    int size, threads;
    if (!PyArg_ParseTuple(args, "KKllii", &from, &to, &N, &K, &size, &threads))
        return NULL;
    long panels = (N + PANEL - 1) / PANEL;
#if defined(__linux__) /* fewer page-table walks while the weights stream by */
    {
        uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)to + page - 1) / page * page;
        uintptr_t last = ((uintptr_t)to + panels * PANEL * K * size) / page * page;
        if (first < last)
            madvise((void *)first, last - first, MADV_HUGEPAGE);
    }
#endif
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long panel = 0; panel < panels; panel++)
        for (long k0 = 0; k0 < K; k0 += 32) { /* squares of 32 x 32 keep both sides in cache */
            long k1 = k0 + 32 < K ? k0 + 32 : K;
            for (long c = 0; c < PANEL; c++) {
                long n = panel * PANEL + c;
                for (long k = k0; k < k1; k++) {
                    if (size == 2)
                        ((uint16_t *)(uintptr_t)to)[(panel * K + k) * PANEL + c % HALF * 2 + c / HALF] = n < N ? ((const uint16_t *)(uintptr_t)from)[n * K + k] : 0;
                    else
                        ((uint32_t *)(uintptr_t)to)[(panel * K + k) * PANEL + c] = n < N ? ((const uint32_t *)(uintptr_t)from)[n * K + k] : 0;
                }
            }
        }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Gives back the pages of a tensor that nobody will read again, before it is freed: of a mapped file they would stay counted. */
static PyObject *release(PyObject *self, PyObject *args)
{
    unsigned long long at, size;
    if (!PyArg_ParseTuple(args, "KK", &at, &size))
        return NULL;
#if defined(__linux__)
    unsigned long long page = (unsigned long long)sysconf(_SC_PAGESIZE), first = (at + page - 1) / page * page;
    unsigned long long last = (at + size) / page * page;
    if (first < last)
        madvise((void *)(uintptr_t)first, last - first, MADV_DONTNEED);
#else
    (void)at, (void)size;
#endif
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"variants", list_variants, METH_NOARGS, "Name and number of the variants that this processor can run, best first."},
    {"linear", linear, METH_VARARGS, "linear(x, weights, bias, out, M, N, K, type, variant, threads): addresses and sizes."},
    {"gated", gated, METH_VARARGS, "gated(x, gate, up, out, M, N, K, type, activation, variant, threads): addresses and sizes."},
    {"norm", norm, METH_VARARGS, "norm(x, weight, out, M, N, epsilon, variant): addresses and sizes."},
    {"attend", attend, METH_VARARGS, "attention of a few rows of one sequence: addresses, sizes and strides of struct attention"},
    {"pack", pack, METH_VARARGS, "pack(weights, packed, N, K, element_size, threads)"},
    {"release", release, METH_VARARGS, "release(address, bytes): the contents are lost"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_skinny", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__skinny(void) { return PyModule_Create(&module); }
