/*
 * Python callables as the C functions of a PyTorch allocator. bridge.py compiles this and says why.
 *
 * PyTorch calls on any thread, with the GIL or without it, and also while a Python exception is
 * pending: an operation that fails drops its temporary tensors before anybody handles its error.
 * `call` sets that exception aside, for Python code cannot run with it, and is the only way from
 * here into Python.
 *
 * One copy of this module serves one set of callables, from its `connect` to the end of the process.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdint.h>

static PyObject *malloc_callable;
static PyObject *free_callable;
static PyObject *record_stream_callable;
static PyObject *reset_callable;

/* False before `connect`, and after `disconnect`: nothing of Python is touched then, for threads may
 * call when there is no interpreter any more. Read without the GIL. */
static atomic_bool connected;

/* The integer that the callable returns, as an address; NULL for None, or if anything goes wrong.
 * The arguments are integers, as Py_BuildValue takes them. */
static void *call(PyObject **callable, const char *format, ...)
{
    if (!atomic_load(&connected))
        return NULL;

    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);

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
    if (!PyArg_ParseTuple(arguments, "OOOO:connect", &malloc_callable, &free_callable,
                          &record_stream_callable, &reset_callable))
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
     "connect(malloc, free, record_stream, reset): the addresses of four C functions, once."},
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
