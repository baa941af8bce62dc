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
 *
 * The front cache (docs/host-cache.md, invariants F1 to F6) keeps blocks that PyTorch freed and hands
 * them out again without Python. There is one `struct front` per device, with its own mutex. Under
 * the mutex nothing waits, allocates Python objects, or takes the GIL.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

/* The front cache ---------------------------------------------------------------------------------
 *
 * A block is an entry of `blocks`, found by its address as long as PyTorch has it (lent) or the front
 * holds it. Held blocks of one class, a (stream, request rounded up to `unit`), are a stack, linked
 * by `below`; the top is found by the class. Both tables are open-addressed, with linear probing, of
 * indices into `blocks` plus one; 0 is an empty place. Deleting moves later entries up, so nothing
 * dead stays in a table.
 *
 * So that giving blocks up costs no more than what it brings back, the held blocks are also lists, by
 * the log2 of their size, and so are those whose request is not the one that Python knows. What was
 * held last is first in its list, and on top of its stack. */

enum { MAX_DEVICES = 64, LOG_ROWS = 1 << 15 };
enum { NONE = 0, LENT, HELD };
enum { HELD_LISTS = 64, CHANGED_LIST = HELD_LISTS, LISTS };
enum { OF_HELD, OF_CHANGED, LINKS }; /* a block is in one list of each kind at most */

/* Rows as in devalloc/cache/statistics.py, whose test compares them. */
enum { MALLOC = 2, FREE = 4, MALLOC_PART = 18, FREE_PART = 20 };

struct block {
    uint64_t address, stream, class_bytes, head, requested;
    uint32_t below; /* in its stack, or among the unused entries; index plus one */
    uint32_t before[LINKS], after[LINKS];
    uint8_t state, part, changed, excluded;
};

struct table {
    uint32_t *places;
    uint64_t mask, used;
};

struct front {
    pthread_mutex_t mutex;
    int on, full, zero_is_null;
    uint64_t unit, max_bytes, max_blocks;
    uint64_t held_bytes, held_blocks, changed_blocks;
    struct block *blocks;
    uint32_t capacity, unused, first[LISTS];
    struct table by_address, by_class;
    uint64_t (*log)[2];
    uint32_t rows;
};

static struct front fronts[MAX_DEVICES];

static uint64_t mix(uint64_t word)
{
    word ^= word >> 32;
    word *= 0x9e3779b97f4a7c15u; /* 2^64 over the golden ratio */
    return word ^ word >> 29;
}

static uint64_t hash_of(const struct front *front, const struct table *table, uint32_t index)
{
    const struct block *block = &front->blocks[index - 1];
    return table == &front->by_address ? mix(block->address)
                                       : mix(mix(block->class_bytes) + block->stream);
}

/* The place of the entry that is equal to `key`, or the empty place where it would be. */
static uint64_t find(const struct front *front, const struct table *table, uint64_t hash,
                     uint64_t first, uint64_t second)
{
    uint64_t at = hash & table->mask;
    for (uint32_t index; (index = table->places[at]) != 0; at = (at + 1) & table->mask) {
        const struct block *block = &front->blocks[index - 1];
        if (table == &front->by_address
                ? block->address == first
                : block->class_bytes == first && block->stream == second)
            break;
    }
    return at;
}

static uint64_t place_of_address(const struct front *front, uint64_t address)
{
    return find(front, &front->by_address, mix(address), address, 0);
}

static uint64_t place_of_class(const struct front *front, uint64_t class_bytes, uint64_t stream)
{
    return find(front, &front->by_class, mix(mix(class_bytes) + stream), class_bytes, stream);
}

static void delete_place(struct front *front, struct table *table, uint64_t at)
{
    uint64_t next = at;
    for (;;) {
        next = (next + 1) & table->mask;
        uint32_t index = table->places[next];
        if (index == 0)
            break;
        /* An entry may move up unless its first choice lies behind the gap. */
        uint64_t home = hash_of(front, table, index) & table->mask;
        if (((next - home) & table->mask) >= ((next - at) & table->mask)) {
            table->places[at] = index;
            at = next;
        }
    }
    table->places[at] = 0;
    table->used--;
}

/* Room for one more entry, at most two thirds full; 0 if there is no memory. */
static int reserve(struct front *front, struct table *table)
{
    uint64_t size = table->places == NULL ? 0 : table->mask + 1;
    if (3 * (table->used + 1) <= 2 * size)
        return 1;
    struct table larger = {.mask = (size == 0 ? 1024 : 2 * size) - 1, .used = table->used};
    larger.places = calloc(larger.mask + 1, sizeof *larger.places);
    if (larger.places == NULL)
        return 0;
    for (uint64_t at = 0; at < size; at++) {
        uint32_t index = table->places[at];
        if (index == 0)
            continue;
        uint64_t to = hash_of(front, table, index) & larger.mask;
        while (larger.places[to] != 0)
            to = (to + 1) & larger.mask;
        larger.places[to] = index;
    }
    free(table->places);
    *table = larger;
    return 1;
}

/* An unused entry's index plus one; 0 if there is no memory. */
static uint32_t new_block(struct front *front)
{
    if (front->unused == 0) {
        uint32_t capacity = front->capacity == 0 ? 1024 : 2 * front->capacity;
        struct block *blocks = realloc(front->blocks, capacity * sizeof *blocks);
        if (blocks == NULL)
            return 0;
        for (uint32_t at = capacity; at > front->capacity; at--) {
            blocks[at - 1] = (struct block){.below = front->unused};
            front->unused = at;
        }
        front->blocks = blocks;
        front->capacity = capacity;
    }
    uint32_t index = front->unused;
    front->unused = front->blocks[index - 1].below;
    return index;
}

static int link_of(int list)
{
    return list == CHANGED_LIST ? OF_CHANGED : OF_HELD;
}

static void enter_list(struct front *front, int list, uint32_t index)
{
    int link = link_of(list);
    uint32_t after = front->first[list];
    front->blocks[index - 1].before[link] = 0;
    front->blocks[index - 1].after[link] = after;
    if (after != 0)
        front->blocks[after - 1].before[link] = index;
    front->first[list] = index;
}

static void leave_list(struct front *front, int list, uint32_t index)
{
    int link = link_of(list);
    uint32_t before = front->blocks[index - 1].before[link];
    uint32_t after = front->blocks[index - 1].after[link];
    if (before != 0)
        front->blocks[before - 1].after[link] = after;
    else
        front->first[list] = after;
    if (after != 0)
        front->blocks[after - 1].before[link] = before;
}

/* Of a block that is held. */
static int held_list(const struct block *block)
{
    return 63 - __builtin_clzll(block->class_bytes);
}

static void forget_change(struct front *front, uint32_t index)
{
    struct block *block = &front->blocks[index - 1];
    if (block->changed) {
        leave_list(front, CHANGED_LIST, index);
        front->changed_blocks--;
        block->changed = 0;
    }
}

/* Of a block that is not held. */
static void forget_block(struct front *front, uint32_t index)
{
    struct block *block = &front->blocks[index - 1];
    forget_change(front, index);
    delete_place(front, &front->by_address, place_of_address(front, block->address));
    *block = (struct block){.below = front->unused};
    front->unused = index;
}

static void write_row(struct front *front, const struct block *block, int code, int code_of_part)
{
    uint64_t *row = front->log[front->rows++];
    row[0] = block->head | (uint64_t)(block->part ? code_of_part : code);
    row[1] = block->requested;
}

/* Of the block on top of the stack of its class, which is at place `at`: it is not held any more. */
static void take_top(struct front *front, uint64_t at)
{
    uint32_t index = front->by_class.places[at];
    struct block *block = &front->blocks[index - 1];
    if (block->below != 0)
        front->by_class.places[at] = block->below;
    else
        delete_place(front, &front->by_class, at);
    leave_list(front, held_list(block), index);
    front->held_blocks--;
    front->held_bytes -= block->class_bytes;
}

/* A held block for a request that is not empty; NULL if there is none. */
static void *take_held(struct front *front, uint64_t nbytes, uint64_t stream)
{
    if (!front->on || nbytes == 0 || front->by_class.used == 0 || front->rows == LOG_ROWS)
        return NULL;
    uint64_t class_bytes = (nbytes + front->unit - 1) / front->unit * front->unit;
    uint64_t at = place_of_class(front, class_bytes, stream);
    uint32_t index = front->by_class.places[at];
    if (index == 0)
        return NULL;
    struct block *block = &front->blocks[index - 1];
    take_top(front, at);
    block->state = LENT;
    if (block->requested != nbytes && !block->changed) {
        enter_list(front, CHANGED_LIST, index);
        front->changed_blocks++;
        block->changed = 1;
    }
    block->requested = nbytes;
    write_row(front, block, MALLOC, MALLOC_PART);
    return (void *)(uintptr_t)block->address;
}

/* Whether the front holds the block from now on. If not, Python must free it. */
static int hold(struct front *front, uint64_t address)
{
    if (front->by_address.used == 0)
        return 0;
    uint32_t index = front->by_address.places[place_of_address(front, address)];
    if (index == 0)
        return 0;
    struct block *block = &front->blocks[index - 1];
    if (block->state != LENT) /* freed twice: Python finds it here, and says so */
        return 0;
    int may = front->on && !block->excluded && block->class_bytes > 0 &&
              block->class_bytes <= front->max_bytes &&
              front->rows < LOG_ROWS && reserve(front, &front->by_class);
    int fits = front->held_blocks < front->max_blocks &&
               front->held_bytes + block->class_bytes <= front->max_bytes;
    front->full |= may && !fits;
    if (!may || !fits) {
        forget_block(front, index);
        return 0;
    }
    uint64_t at = place_of_class(front, block->class_bytes, block->stream);
    block->below = front->by_class.places[at];
    if (block->below == 0)
        front->by_class.used++;
    front->by_class.places[at] = index;
    block->state = HELD;
    enter_list(front, held_list(block), index);
    front->held_blocks++;
    front->held_bytes += block->class_bytes;
    write_row(front, block, FREE, FREE_PART);
    return 1;
}

static struct front *front_of(int device)
{
    return device >= 0 && device < MAX_DEVICES ? &fronts[device] : NULL;
}

/* Whether the request is answered without Python; then `*address` is the answer. */
static int take_from_front(int device, size_t nbytes, void *stream, void **address)
{
    struct front *front = front_of(device);
    if (front == NULL || !atomic_load(&connected))
        return 0;
    pthread_mutex_lock(&front->mutex);
    *address = take_held(front, nbytes, (uintptr_t)stream);
    int answered = *address != NULL || (nbytes == 0 && front->zero_is_null);
    pthread_mutex_unlock(&front->mutex);
    return answered;
}

static int give_to_front(int device, const void *address)
{
    struct front *front = front_of(device);
    if (front == NULL || address == NULL || !atomic_load(&connected))
        return 0;
    pthread_mutex_lock(&front->mutex);
    int held = hold(front, (uintptr_t)address);
    pthread_mutex_unlock(&front->mutex);
    return held;
}

/* A child must not have a mutex that a thread holds which is not there. */
static void before_fork(void)
{
    for (int device = 0; device < MAX_DEVICES; device++)
        pthread_mutex_lock(&fronts[device].mutex);
}

static void after_fork(void)
{
    for (int device = MAX_DEVICES; device-- > 0;)
        pthread_mutex_unlock(&fronts[device].mutex);
}

/* What Python calls of the front. It has the GIL, and nothing of Python happens under the mutex. */

static struct front *front_argument(int device)
{
    struct front *front = front_of(device);
    if (front == NULL)
        PyErr_Format(PyExc_ValueError, "there is no front for device %d", device);
    return front;
}

static PyObject *front_open(PyObject *module, PyObject *arguments)
{
    (void)module;
    int device, zero_is_null;
    unsigned long long unit, max_bytes, max_blocks;
    if (!PyArg_ParseTuple(arguments, "iKpKK:front_open", &device, &unit, &zero_is_null, &max_bytes,
                          &max_blocks))
        return NULL;
    struct front *front = front_argument(device);
    if (front == NULL)
        return NULL;
    if (unit == 0) {
        PyErr_SetString(PyExc_ValueError, "the unit is at least one byte");
        return NULL;
    }
    void *log = front->log != NULL ? front->log : malloc(LOG_ROWS * sizeof *front->log);
    if (log == NULL)
        return PyErr_NoMemory();
    pthread_mutex_lock(&front->mutex);
    front->log = log;
    front->unit = unit;
    front->zero_is_null = zero_is_null;
    front->max_bytes = max_bytes;
    front->max_blocks = max_blocks;
    pthread_mutex_unlock(&front->mutex);
    Py_RETURN_NONE;
}

/* Integers as a list, which takes the place of NULL elsewhere too: NULL if there is no memory. */
static PyObject *list_of(const uint64_t *words, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t at = 0; list != NULL && at < count; at++) {
        PyObject *word = PyLong_FromUnsignedLongLong(words[at]);
        if (word == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)at, word);
    }
    return list;
}

static void count_words(const struct front *front, size_t counts[3])
{
    counts[0] = 2 * (size_t)front->rows;
    counts[1] = front->held_blocks;
    counts[2] = 2 * front->changed_blocks;
}

/* Take out: all rows; (address, requested bytes) of all blocks whose request has changed; addresses
 * of held blocks, until they have `nbytes` in all or no block of at least `least` bytes is held, those
 * of most bytes (by their log2) first. The arrays are large enough. */
static void take_out(struct front *front, uint64_t nbytes, uint64_t least, uint64_t *words[3])
{
    memcpy(words[0], front->log, 2 * sizeof(uint64_t) * front->rows);
    words[0] += 2 * front->rows;
    front->rows = 0;
    while (front->first[CHANGED_LIST] != 0) {
        uint32_t index = front->first[CHANGED_LIST];
        *words[2]++ = front->blocks[index - 1].address;
        *words[2]++ = front->blocks[index - 1].requested;
        forget_change(front, index);
    }
    uint64_t given = 0;
    for (int list = HELD_LISTS - 1; list >= 0 && (uint64_t)1 << list >= least; list--) {
        uint32_t index;
        while (given < nbytes && (index = front->first[list]) != 0) {
            struct block *block = &front->blocks[index - 1];
            *words[1]++ = block->address;
            given += block->class_bytes;
            take_top(front, place_of_class(front, block->class_bytes, block->stream));
            forget_block(front, index);
        }
    }
    if (front->held_blocks == 0)
        front->full = 0;
}

static PyObject *front_switch(PyObject *module, PyObject *arguments)
{
    (void)module;
    int device, on;
    unsigned long long nbytes, least;
    PyObject *into;
    if (!PyArg_ParseTuple(arguments, "ipKKO!:front_switch", &device, &on, &nbytes, &least,
                          &PyList_Type, &into))
        return NULL;
    struct front *front = front_argument(device);
    if (front == NULL)
        return NULL;
    uint64_t *words[3] = {NULL, NULL, NULL};
    size_t counts[3], room[3] = {0, 0, 0};
    PyObject *lists[3] = {NULL, NULL, NULL}, *entry = NULL;
    for (;;) { /* until the arrays are large enough: others may add to the front meanwhile */
        pthread_mutex_lock(&front->mutex);
        count_words(front, counts);
        int enough = front->log != NULL;
        for (int at = 0; at < 3; at++)
            enough &= words[at] != NULL && counts[at] <= room[at];
        if (enough) {
            uint64_t *ends[3] = {words[0], words[1], words[2]};
            take_out(front, nbytes, least, ends);
            for (int at = 0; at < 3; at++)
                counts[at] = (size_t)(ends[at] - words[at]);
            front->on = on;
        }
        pthread_mutex_unlock(&front->mutex);
        if (enough)
            break;
        for (int at = 0; at < 3; at++) {
            free(words[at]);
            room[at] = 2 * counts[at] + 64;
            words[at] = malloc(room[at] * sizeof *words[at]);
        }
        if (front->log == NULL || !words[0] || !words[1] || !words[2]) {
            PyErr_NoMemory();
            goto end;
        }
    }
    /* From here on failing would lose blocks. It can fail only for want of memory for small ints. */
    for (int at = 0; at < 3; at++)
        lists[at] = list_of(words[at], counts[at]);
    if (lists[0] != NULL && lists[1] != NULL && lists[2] != NULL)
        entry = PyTuple_Pack(3, lists[0], lists[1], lists[2]);
    if (entry != NULL && PyList_Append(into, entry) < 0)
        Py_CLEAR(entry);
end:
    for (int at = 0; at < 3; at++) {
        free(words[at]);
        Py_XDECREF(lists[at]);
    }
    if (entry == NULL)
        return NULL;
    Py_DECREF(entry);
    Py_RETURN_NONE;
}

static PyObject *front_read_log(PyObject *module, PyObject *arguments)
{
    (void)module;
    int device;
    PyObject *into;
    if (!PyArg_ParseTuple(arguments, "iO!:front_read_log", &device, &PyList_Type, &into))
        return NULL;
    struct front *front = front_argument(device);
    if (front == NULL)
        return NULL;
    pthread_mutex_lock(&front->mutex);
    uint32_t rows = front->rows;
    int full = front->full;
    pthread_mutex_unlock(&front->mutex);
    if (rows > 0) {
        uint64_t *words = malloc(2 * sizeof *words * rows);
        if (words == NULL)
            return PyErr_NoMemory();
        pthread_mutex_lock(&front->mutex);
        if (front->rows < rows) /* somebody else has read some */
            rows = front->rows;
        memcpy(words, front->log, 2 * sizeof *words * rows);
        memmove(front->log, front->log + rows, (front->rows - rows) * sizeof *front->log);
        front->rows -= rows;
        pthread_mutex_unlock(&front->mutex);
        PyObject *list = list_of(words, 2 * (size_t)rows);
        free(words);
        PyObject *entry = list == NULL ? NULL : Py_BuildValue("(N[][])", list);
        if (entry == NULL || PyList_Append(into, entry) < 0) {
            Py_XDECREF(entry);
            return NULL;
        }
        Py_DECREF(entry);
    }
    return PyBool_FromLong(full);
}

static PyObject *front_lend(PyObject *module, PyObject *arguments)
{
    (void)module;
    int device, part;
    unsigned long long address, nbytes, stream, head;
    if (!PyArg_ParseTuple(arguments, "iKKKKp:front_lend", &device, &address, &nbytes, &stream,
                          &head, &part))
        return NULL;
    struct front *front = front_argument(device);
    if (front == NULL)
        return NULL;
    pthread_mutex_lock(&front->mutex);
    uint32_t known = front->by_address.used == 0
                         ? 0
                         : front->by_address.places[place_of_address(front, address)];
    int held = known != 0 && front->blocks[known - 1].state == HELD;
    if (known != 0 && !held)
        forget_block(front, known); /* of a call that was interrupted: Python knows better */
    if (!held && front->log != NULL && reserve(front, &front->by_address)) {
        uint32_t index = new_block(front);
        if (index != 0) {
            front->blocks[index - 1] = (struct block){
                .address = address,
                .stream = stream,
                .class_bytes = (nbytes + front->unit - 1) / front->unit * front->unit,
                .head = head,
                .requested = nbytes,
                .state = LENT,
                .part = (uint8_t)part,
            };
            front->by_address.places[place_of_address(front, address)] = index;
            front->by_address.used++;
        }
    }
    pthread_mutex_unlock(&front->mutex);
    if (held) {
        PyErr_Format(PyExc_RuntimeError, "the front holds a block at 0x%llx already", address);
        return NULL;
    }
    Py_RETURN_NONE; /* without memory for the entry too: then Python frees the block */
}

/* Exclude one block, or with `all` set every block of a stream, from being held. Whether the block
 * is known. */
static PyObject *front_exclude(PyObject *module, PyObject *arguments)
{
    (void)module;
    int device, all;
    unsigned long long which;
    if (!PyArg_ParseTuple(arguments, "iKp:front_exclude", &device, &which, &all))
        return NULL;
    struct front *front = front_argument(device);
    if (front == NULL)
        return NULL;
    int known = 0;
    pthread_mutex_lock(&front->mutex);
    if (!all && front->by_address.used > 0) {
        uint32_t index = front->by_address.places[place_of_address(front, which)];
        known = index != 0;
        if (known)
            front->blocks[index - 1].excluded = 1;
    }
    for (uint32_t at = 0; all && at < front->capacity; at++)
        if (front->blocks[at].state == LENT && front->blocks[at].stream == which)
            front->blocks[at].excluded = 1;
    pthread_mutex_unlock(&front->mutex);
    return PyBool_FromLong(known);
}

static PyObject *front_counts(PyObject *module, PyObject *arguments)
{
    (void)module;
    int device;
    if (!PyArg_ParseTuple(arguments, "i:front_counts", &device))
        return NULL;
    struct front *front = front_argument(device);
    if (front == NULL)
        return NULL;
    pthread_mutex_lock(&front->mutex);
    unsigned long long known = front->by_address.used, classes = front->by_class.used;
    unsigned long long held = front->held_blocks, bytes = front->held_bytes;
    pthread_mutex_unlock(&front->mutex);
    return Py_BuildValue("(KKKK)", known, held, bytes, classes);
}

/* What PyTorch calls: see torch/csrc/cuda/CUDAPluggableAllocator.h. A stream is a pointer there. */

static void *on_malloc(size_t nbytes, int device, void *stream)
{
    void *address;
    if (take_from_front(device, nbytes, stream, &address))
        return address;
    return call(&malloc_callable, "(KiK)", (unsigned long long)nbytes, device, integer(stream));
}

static void on_free(void *address, size_t nbytes, int device, void *stream)
{
    if (give_to_front(device, address))
        return;
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
    pthread_atfork(before_fork, after_fork, after_fork);
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
    {"front_open", front_open, METH_VARARGS,
     "front_open(device, unit, zero_is_null, max_bytes, max_blocks): set the front of a device up. It "
     "is off."},
    {"front_switch", front_switch, METH_VARARGS,
     "front_switch(device, on, nbytes, least, into): give up held blocks of at least `least` bytes, "
     "large ones first, until they have `nbytes` in all; hold from now on or no more; append (words of "
     "rows, addresses, (address, bytes) of changed requests) to the list."},
    {"front_read_log", front_read_log, METH_VARARGS,
     "front_read_log(device, into): append (words of rows, [], []) if there are any; whether blocks "
     "were refused because the bounds are reached."},
    {"front_lend", front_lend, METH_VARARGS,
     "front_lend(device, address, nbytes, stream, head, part): a block that PyTorch gets now."},
    {"front_exclude", front_exclude, METH_VARARGS,
     "front_exclude(device, address, False), or (device, stream, True): do not hold what is lent; "
     "whether a block is known at the address."},
    {"front_counts", front_counts, METH_VARARGS,
     "front_counts(device): blocks known, blocks held, bytes held, classes."},
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
    for (int device = 0; device < MAX_DEVICES; device++)
        pthread_mutex_init(&fronts[device].mutex, NULL);
    return PyModule_Create(&definition);
}
