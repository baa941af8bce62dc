/*
 * Python callables as the C functions of a PyTorch allocator. bridge.py compiles this and says why.
 *
 * PyTorch calls on any thread, with the GIL or without it, and also while a Python exception is
 * pending: an operation that fails drops its temporary tensors before anybody handles its error.
 * `call` sets that exception aside, for Python code cannot run with it, and is the only way from
 * here into Python.
 *
 * Nor can an exception leave here. Ctrl-C would end a callable wherever it is, at its first step
 * too, and the block that it was to take or to give back would be lost. So meanwhile it is only
 * noted (`hold_interrupts`), and comes when the call is over.
 *
 * One copy of this module serves one set of callables, from its `connect` to the end of the process.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>

static PyObject *malloc_callable;
static PyObject *free_callable;
static PyObject *record_stream_callable;
static PyObject *reset_callable;

/* False before `connect`, and after `disconnect`: nothing of Python is touched then, for threads may
 * call when there is no interpreter any more. Read without the GIL. */
static atomic_bool connected;

/* The only thread on which Python handles signals; whatever follows is used there only. */
static unsigned long main_thread;
static int depth; /* A callable may free tensors, and so be called within itself. */
static struct sigaction handler;
static atomic_bool interrupted;

static void note(int number)
{
    (void)number;
    atomic_store(&interrupted, 1);
}

static int on_main_thread(void)
{
    return (unsigned long)PyThread_get_thread_ident() == main_thread;
}

static void hold_interrupts(void)
{
    if (!on_main_thread())
        return;
    if (depth++ == 0) {
        struct sigaction noting = {.sa_handler = note, .sa_flags = SA_RESTART};
        sigemptyset(&noting.sa_mask);
        sigaction(SIGINT, &noting, &handler);
    }
    /* What came before, and would be handled now. */
    if (PyErr_CheckSignals() == 0)
        return;
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        PyErr_Clear();
        atomic_store(&interrupted, 1);
    } else {
        PyErr_WriteUnraisable(NULL);
    }
}

static void let_interrupts_come(void)
{
    if (!on_main_thread() || --depth > 0)
        return;
    sigaction(SIGINT, &handler, NULL);
    if (atomic_exchange(&interrupted, 0))
        raise(SIGINT);
}

/* The integer that the callable returns, as an address; NULL for None, or if anything goes wrong.
 * The arguments are integers, as Py_BuildValue takes them. */
static void *call(PyObject **callable, const char *format, ...)
{
    if (!atomic_load(&connected))
        return NULL;

    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    hold_interrupts();

    va_list integers;
    va_start(integers, format);
    PyObject *arguments = Py_VaBuildValue(format, integers);
    va_end(integers);

    void *address = NULL;
    PyObject *result = arguments == NULL ? NULL : PyObject_CallObject(*callable, arguments);
    if (result != NULL && result != Py_None)
        address = PyLong_AsVoidPtr(result);
    if (PyErr_Occurred())
        PyErr_WriteUnraisable(*callable);
    Py_XDECREF(result);
    Py_XDECREF(arguments);

    let_interrupts_come();
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(gil);
    return address;
}

/* An address, for the format K. */
static unsigned long long integer(const void *address)
{
    return (uintptr_t)address;
}

/* What PyTorch calls: see torch/csrc/cuda/CUDAPluggableAllocator.h. A stream is a pointer there. */

static void *on_malloc(size_t nbytes, int device, void *stream)
{
    return call(&malloc_callable, "(KiK)", (unsigned long long)nbytes, device, integer(stream));
}

static void on_free(void *address, size_t nbytes, int device, void *stream)
{
    call(&free_callable, "(KKiK)", integer(address), (unsigned long long)nbytes, device,
         integer(stream));
}

static void on_record_stream(void *address, void *stream)
{
    call(&record_stream_callable, "(KK)", integer(address), integer(stream));
}

static void on_reset(void)
{
    call(&reset_callable, "()");
}

/* What bridge.py calls. */

static PyObject *connect(PyObject *module, PyObject *arguments)
{
    (void)module;
    if (malloc_callable != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this bridge is connected already");
        return NULL;
    }
    if (!PyArg_ParseTuple(arguments, "kOOOO:connect", &main_thread, &malloc_callable,
                          &free_callable, &record_stream_callable, &reset_callable))
        return NULL;
    /* For ever: PyTorch may call at any time. */
    Py_INCREF(malloc_callable);
    Py_INCREF(free_callable);
    Py_INCREF(record_stream_callable);
    Py_INCREF(reset_callable);
    atomic_store(&connected, 1);
    return Py_BuildValue("(KKKK)", (unsigned long long)(uintptr_t)on_malloc,
                         (unsigned long long)(uintptr_t)on_free,
                         (unsigned long long)(uintptr_t)on_record_stream,
                         (unsigned long long)(uintptr_t)on_reset);
}

static PyObject *disconnect(PyObject *module, PyObject *none)
{
    (void)module;
    (void)none;
    atomic_store(&connected, 0);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS,
     "connect(main_thread, malloc, free, record_stream, reset): the addresses of four C functions, "
     "once. Threads are named as by threading.get_ident."},
    {"disconnect", disconnect, METH_NOARGS, "From now on the C functions return NULL at once."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "devalloc_bridge",
    .m_doc = "Python callables as the C functions of a PyTorch allocator.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit_devalloc_bridge(void)
{
    return PyModule_Create(&definition);
}
