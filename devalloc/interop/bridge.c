/*
 * Python callables as the C functions of a PyTorch allocator. bridge.py compiles this and says why.
 *
 * PyTorch calls on any thread, with the GIL or without it, and also while a Python exception is
 * pending: an operation that fails drops its temporary tensors before any code handles its error.
 * `call` sets that exception aside, for Python code cannot run with it, and is the only way from
 * here into Python.
 *
 * Nor can an exception leave here. Ctrl-C would end a callable wherever it is, at its first step
 * too, and the block that it was to take or to give back would be lost. So meanwhile it is only
 * noted (`hold_interrupts`), and comes when the call is over.
 *
 * One copy of this module serves one set of callables, from its `connect` to the end of the process.
 *
 * The front (docs/design/host.md, invariants F1 to F7) allocates and frees for PyTorch without
 * Python. There is one `struct front` per device, with its own mutex. Under the mutex nothing waits,
 * allocates Python objects, or takes the GIL.
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

/* The front ----------------------------------------------------------------------------------------
 *
 * While it is on, a front serves the default pools of a cache in place of Python, by the policy's own
 * rule: best fit, split, merge. It has the blocks of all their segments, each of which it may hand
 * out and free unless Python keeps it (blocks that are pending, that other streams use, or that the
 * arena's own users free with a claim).
 *
 * A block is an entry of `blocks`; indices are plus one, so that 0 is none. Blocks of a segment are a
 * list by address. The free blocks of a home, a (stream, pool), are a treap by (size, address), whose
 * priorities are hashes of addresses: finding, adding and removing take O(log n). Blocks that are not
 * free are found by their address, and plans (the size and the pool of a request, which Python has
 * told) by the rounded request, in open-addressed tables with linear probing. Deleting moves later
 * entries up, so no deleted entry stays in a table. */

enum { MAX_DEVICES = 64, LOG_ROWS = 1 << 15, ROWS_OF_A_CALL = 4, MAX_PLANS = 1 << 16 };

/* As in devalloc/arena/cache/front.py. A word about a block is its home, FIRST of its segment, its state. */
enum { FREE_BLOCK, LENT_BLOCK, KEPT_BLOCK, SHARED_BLOCK, STATES = 3 };
enum { FIRST_BLOCK = 4, HOME_SHIFT = 3, WORDS_OF_A_BLOCK = 4 };

/* Rows as in devalloc/arena/store/statistics.py, whose test compares them. */
enum { MALLOC = 2, FREE = 4, SPLIT_IN = 10, SPLIT_OUT = 12, MALLOC_PART = 18, FREE_PART = 20 };

struct block {
    uint64_t address, size, requested;
    uint32_t before, after; /* in the segment; `after` also links the unused entries */
    uint32_t left, right;   /* in the treap of its home */
    uint32_t home;
    uint8_t state, first;
};

struct home {
    uint64_t stream, pool;
    uint32_t root;
};

struct plan {
    uint64_t request, size, pool;
};

struct table {
    uint32_t *places;
    uint64_t mask, used;
};

/* How the policy chooses: see devalloc.arena.policies.policy.FrontRule. */
struct rule {
    unsigned long long least_rest[2], oversize, slack;
    int halves, takes_tail;
};

struct front {
    pthread_mutex_t mutex;
    int on, zero_is_null;
    uint64_t unit;
    struct rule rule;
    struct block *blocks;
    uint32_t capacity, unused;
    struct home *homes;
    uint64_t home_count;
    struct plan *plans;
    struct table by_address, by_request;
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

/* Tables */

static uint64_t key_of(const struct front *front, const struct table *table, uint32_t index)
{
    return table == &front->by_address ? front->blocks[index - 1].address
                                       : front->plans[index - 1].request;
}

/* The place of the entry with this key, or the empty place where it would be. */
static uint64_t place_of(const struct front *front, const struct table *table, uint64_t key)
{
    uint64_t at = mix(key) & table->mask;
    for (uint32_t index; (index = table->places[at]) != 0; at = (at + 1) & table->mask)
        if (key_of(front, table, index) == key)
            break;
    return at;
}

static uint32_t find(const struct front *front, const struct table *table, uint64_t key)
{
    return table->used == 0 ? 0 : table->places[place_of(front, table, key)];
}

static void delete_key(struct front *front, struct table *table, uint64_t key)
{
    uint64_t at = place_of(front, table, key), next = at;
    for (;;) {
        next = (next + 1) & table->mask;
        uint32_t index = table->places[next];
        if (index == 0)
            break;
        /* An entry may move up unless its first choice lies behind the gap. */
        uint64_t choice = mix(key_of(front, table, index)) & table->mask;
        if (((next - choice) & table->mask) >= ((next - at) & table->mask)) {
            table->places[at] = index;
            at = next;
        }
    }
    table->places[at] = 0;
    table->used--;
}

static void insert_key(struct front *front, struct table *table, uint64_t key, uint32_t index)
{
    table->places[place_of(front, table, key)] = index;
    table->used++;
}

/* Room for `more` entries, at most two thirds full; 0 if there is no memory. */
static int reserve(struct front *front, struct table *table, uint64_t more)
{
    uint64_t size = table->places == NULL ? 0 : table->mask + 1, larger_size = size;
    while (3 * (table->used + more) > 2 * larger_size)
        larger_size = larger_size == 0 ? 1024 : 2 * larger_size;
    if (larger_size == size)
        return 1;
    struct table larger = {.mask = larger_size - 1, .used = table->used};
    larger.places = calloc(larger_size, sizeof *larger.places);
    if (larger.places == NULL)
        return 0;
    for (uint64_t at = 0; at < size; at++) {
        uint32_t index = table->places[at];
        if (index == 0)
            continue;
        uint64_t to = mix(key_of(front, table, index)) & larger.mask;
        while (larger.places[to] != 0)
            to = (to + 1) & larger.mask;
        larger.places[to] = index;
    }
    free(table->places);
    *table = larger;
    return 1;
}

static void empty_table(struct table *table)
{
    if (table->used > 0)
        memset(table->places, 0, (table->mask + 1) * sizeof *table->places);
    table->used = 0;
}

/* Free blocks, in treaps */

/* Whether a block comes before (size, address). */
static int is_less(const struct block *block, uint64_t size, uint64_t address)
{
    return block->size < size || (block->size == size && block->address < address);
}

static uint64_t priority(const struct front *front, uint32_t index)
{
    return mix(front->blocks[index - 1].address);
}

/* Divide a treap at (size, address). */
static void divide(struct front *front, uint32_t root, uint64_t size, uint64_t address,
                   uint32_t *less, uint32_t *rest)
{
    while (root != 0) {
        struct block *block = &front->blocks[root - 1];
        if (is_less(block, size, address)) {
            *less = root;
            less = &block->right;
            root = block->right;
        } else {
            *rest = root;
            rest = &block->left;
            root = block->left;
        }
    }
    *less = *rest = 0;
}

static void add_free(struct front *front, uint32_t index)
{
    struct block *block = &front->blocks[index - 1];
    uint32_t *place = &front->homes[block->home].root;
    while (*place != 0 && priority(front, *place) >= priority(front, index)) {
        struct block *at = &front->blocks[*place - 1];
        place = is_less(at, block->size, block->address) ? &at->right : &at->left;
    }
    divide(front, *place, block->size, block->address, &block->left, &block->right);
    *place = index;
}

static void remove_free(struct front *front, uint32_t index)
{
    struct block *block = &front->blocks[index - 1];
    uint32_t *place = &front->homes[block->home].root;
    while (*place != index) {
        struct block *at = &front->blocks[*place - 1];
        place = is_less(at, block->size, block->address) ? &at->right : &at->left;
    }
    uint32_t less = block->left, rest = block->right;
    while (less != 0 && rest != 0) {
        if (priority(front, less) >= priority(front, rest)) {
            *place = less;
            place = &front->blocks[less - 1].right;
            less = *place;
        } else {
            *place = rest;
            place = &front->blocks[rest - 1].left;
            rest = *place;
        }
    }
    *place = less != 0 ? less : rest;
}

/* The smallest free block of at least `size` bytes, at the lowest address; 0 if there is none. */
static uint32_t best_fit(const struct front *front, const struct home *home, uint64_t size)
{
    uint32_t best = 0, at = home->root;
    while (at != 0) {
        const struct block *block = &front->blocks[at - 1];
        if (is_less(block, size, 0)) {
            at = block->right;
        } else {
            best = at;
            at = block->left;
        }
    }
    return best;
}

/* Blocks */

static int reserve_blocks(struct front *front, uint32_t capacity)
{
    if (capacity <= front->capacity)
        return 1;
    struct block *blocks = realloc(front->blocks, capacity * sizeof *blocks);
    if (blocks == NULL)
        return 0;
    for (uint32_t at = capacity; at > front->capacity; at--) {
        blocks[at - 1] = (struct block){.after = front->unused};
        front->unused = at;
    }
    front->blocks = blocks;
    front->capacity = capacity;
    return 1;
}

/* There is an unused entry. */
static uint32_t new_block(struct front *front)
{
    uint32_t index = front->unused;
    front->unused = front->blocks[index - 1].after;
    return index;
}

static int is_divided(const struct block *block)
{
    return block->before != 0 || block->after != 0;
}

static void write_row(struct front *front, const struct block *block, int code, uint64_t requested)
{
    uint64_t *row = front->log[front->rows++];
    row[0] = block->size | (uint64_t)code | front->homes[block->home].pool;
    row[1] = requested;
}

/* Cut a block that is in no treap `at` bytes from its start; returns the tail. Both are free. */
static uint32_t cut(struct front *front, uint32_t index, uint64_t at)
{
    uint32_t tail_index = new_block(front);
    struct block *block = &front->blocks[index - 1], *tail = &front->blocks[tail_index - 1];
    *tail = (struct block){
        .address = block->address + at,
        .size = block->size - at,
        .before = index,
        .after = block->after,
        .home = block->home,
    };
    if (block->after != 0)
        front->blocks[block->after - 1].before = tail_index;
    block->size = at;
    block->after = tail_index;
    return tail_index;
}

/* Join a block and the one after it, which are both in no treap. */
static void join(struct front *front, uint32_t index)
{
    struct block *block = &front->blocks[index - 1];
    uint32_t second_index = block->after;
    struct block *second = &front->blocks[second_index - 1];
    block->size += second->size;
    block->after = second->after;
    if (second->after != 0)
        front->blocks[second->after - 1].before = index;
    *second = (struct block){.after = front->unused};
    front->unused = second_index;
}

static int may_serve(const struct rule *rule, uint64_t whole, uint64_t size)
{
    if (rule->oversize == 0)
        return 1;
    return size < rule->oversize ? whole < rule->oversize : whole < size + rule->slack;
}

static int splits(const struct rule *rule, uint64_t pool, uint64_t whole, uint64_t size)
{
    if (whole == size || (rule->oversize != 0 && size >= rule->oversize))
        return 0;
    return whole - size >= rule->least_rest[pool] || (rule->halves && whole >= 2 * size);
}

static struct home *home_of(const struct front *front, uint64_t stream, uint64_t pool)
{
    uint64_t low = 0, high = front->home_count;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        struct home *home = &front->homes[middle];
        if (home->stream == stream && home->pool == pool)
            return home;
        if (home->stream < stream || (home->stream == stream && home->pool < pool))
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

/* What `Store.find` and `Store.carve` do. NULL if Python must serve the request. */
static void *serve(struct front *front, uint64_t nbytes, uint64_t size, uint64_t pool,
                   uint64_t stream)
{
    const struct home *home = home_of(front, stream, pool);
    uint32_t index = home == NULL ? 0 : best_fit(front, home, size);
    if (index == 0)
        return NULL;
    uint64_t whole = front->blocks[index - 1].size;
    if (!may_serve(&front->rule, whole, size) || !reserve(front, &front->by_address, 1))
        return NULL;
    int divides = splits(&front->rule, pool, whole, size);
    if (divides && front->unused == 0 && !reserve_blocks(front, 2 * front->capacity))
        return NULL;
    remove_free(front, index);
    struct block *block = &front->blocks[index - 1];
    if (divides) {
        if (is_divided(block))
            write_row(front, block, SPLIT_OUT, 0);
        uint32_t tail = cut(front, index, front->rule.takes_tail ? whole - size : size);
        uint32_t rest = front->rule.takes_tail ? index : tail;
        index = front->rule.takes_tail ? tail : index;
        write_row(front, &front->blocks[rest - 1], SPLIT_IN, 0);
        add_free(front, rest);
        block = &front->blocks[index - 1];
        write_row(front, block, MALLOC, nbytes);
    } else {
        write_row(front, block, is_divided(block) ? MALLOC_PART : MALLOC, nbytes);
    }
    block->state = LENT_BLOCK;
    block->requested = nbytes;
    insert_key(front, &front->by_address, block->address, index);
    return (void *)(uintptr_t)block->address;
}

static int is_ready(const struct front *front)
{
    return front->on && front->rows + ROWS_OF_A_CALL <= LOG_ROWS;
}

/* A block for a request whose plan is known. NULL if Python must serve it. */
static void *allocate(struct front *front, uint64_t nbytes, uint64_t stream)
{
    if (!is_ready(front))
        return NULL;
    uint64_t request = nbytes / front->unit + (nbytes % front->unit != 0);
    uint32_t index = find(front, &front->by_request, request);
    if (index == 0)
        return NULL;
    const struct plan *plan = &front->plans[index - 1];
    return serve(front, nbytes, plan->size, plan->pool, stream);
}

static int may_join(const struct front *front, uint32_t index, uint32_t home)
{
    return index != 0 && front->blocks[index - 1].state == FREE_BLOCK &&
           front->blocks[index - 1].home == home;
}

/* What `Store.put_back` does. Whether that is all: if not, Python must free the block. */
static int release(struct front *front, uint64_t address)
{
    uint32_t index = is_ready(front) ? find(front, &front->by_address, address) : 0;
    if (index == 0 || front->blocks[index - 1].state != LENT_BLOCK)
        return 0;
    struct block *block = &front->blocks[index - 1];
    delete_key(front, &front->by_address, address);
    block->state = FREE_BLOCK;
    uint32_t before = block->before, after = block->after;
    int joins_before = may_join(front, before, block->home);
    int joins_after = may_join(front, after, block->home);
    if (!joins_before && !joins_after) {
        write_row(front, block, is_divided(block) ? FREE_PART : FREE, block->requested);
        add_free(front, index);
        return 1;
    }
    write_row(front, block, FREE, block->requested);
    if (joins_before) {
        write_row(front, &front->blocks[before - 1], SPLIT_OUT, 0);
        remove_free(front, before);
    }
    if (joins_after) {
        write_row(front, &front->blocks[after - 1], SPLIT_OUT, 0);
        remove_free(front, after);
        join(front, index);
    }
    if (joins_before) {
        join(front, before);
        index = before;
    }
    if (is_divided(&front->blocks[index - 1]))
        write_row(front, &front->blocks[index - 1], SPLIT_IN, 0);
    add_free(front, index);
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
    int is_null = nbytes == 0 && front->zero_is_null;
    *address = is_null ? NULL : allocate(front, nbytes, (uintptr_t)stream);
    pthread_mutex_unlock(&front->mutex);
    return is_null || *address != NULL;
}

static int give_to_front(int device, const void *address)
{
    struct front *front = front_of(device);
    if (front == NULL || !atomic_load(&connected))
        return 0;
    pthread_mutex_lock(&front->mutex);
    int done = release(front, (uintptr_t)address);
    pthread_mutex_unlock(&front->mutex);
    return done;
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
    unsigned long long unit;
    if (!PyArg_ParseTuple(arguments, "iKp:front_open", &device, &unit, &zero_is_null))
        return NULL;
    struct front *front = front_argument(device);
    if (front == NULL)
        return NULL;
    if (unit == 0) {
        PyErr_SetString(PyExc_ValueError, "the unit is at least one byte");
        return NULL;
    }
    pthread_mutex_lock(&front->mutex);
    if (front->log == NULL)
        front->log = malloc(LOG_ROWS * sizeof *front->log);
    if (front->plans == NULL)
        front->plans = malloc(MAX_PLANS * sizeof *front->plans);
    int enough = front->log != NULL && front->plans != NULL;
    front->on = 0;
    front->unit = unit;
    front->zero_is_null = zero_is_null;
    empty_table(&front->by_request);
    pthread_mutex_unlock(&front->mutex);
    if (!enough)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* Take over homes and blocks; 0 if there is no memory. The front is off. */
static int take_over(struct front *front, const uint64_t *homes, uint64_t home_count,
                     const uint64_t *words, uint64_t block_count)
{
    struct home *room = realloc(front->homes, (home_count + 1) * sizeof *room);
    if (room == NULL)
        return 0;
    front->homes = room;
    front->home_count = home_count;
    for (uint64_t at = 0; at < home_count; at++)
        front->homes[at] = (struct home){.stream = homes[2 * at], .pool = homes[2 * at + 1]};
    /* Half as many again, for blocks that are split. */
    if (!reserve_blocks(front, (uint32_t)(block_count + block_count / 2 + 64)))
        return 0;
    empty_table(&front->by_address);
    if (!reserve(front, &front->by_address, block_count))
        return 0;
    front->unused = 0;
    for (uint32_t at = front->capacity; at > block_count; at--) {
        front->blocks[at - 1] = (struct block){.after = front->unused};
        front->unused = at;
    }
    for (uint32_t at = 0; at < block_count; at++, words += WORDS_OF_A_BLOCK) {
        struct block *block = &front->blocks[at];
        *block = (struct block){
            .address = words[0],
            .size = words[1],
            .requested = words[2],
            .home = (uint32_t)(words[3] >> HOME_SHIFT),
            .first = (words[3] & FIRST_BLOCK) != 0,
            .state = words[3] & STATES,
        };
        if (!block->first) {
            block->before = at;
            front->blocks[at - 1].after = at + 1;
        }
        if (block->state == FREE_BLOCK)
            add_free(front, at + 1);
        else
            insert_key(front, &front->by_address, block->address, at + 1);
    }
    front->rows = 0;
    return 1;
}

static PyObject *front_start(PyObject *module, PyObject *arguments)
{
    (void)module;
    int device;
    struct rule rule;
    Py_buffer homes, blocks;
    if (!PyArg_ParseTuple(arguments, "i(KKpKKp)y*y*:front_start", &device, &rule.least_rest[0],
                          &rule.least_rest[1], &rule.halves, &rule.oversize, &rule.slack,
                          &rule.takes_tail, &homes, &blocks))
        return NULL;
    struct front *front = front_argument(device);
    int started = 0;
    if (front != NULL) {
        uint64_t block_count = (uint64_t)blocks.len / sizeof(uint64_t) / WORDS_OF_A_BLOCK;
        pthread_mutex_lock(&front->mutex);
        if (!front->on && front->log != NULL && block_count < UINT32_MAX / 4)
            started = take_over(front, homes.buf, (uint64_t)homes.len / sizeof(uint64_t) / 2,
                                blocks.buf, block_count);
        front->rule = rule;
        front->on |= started;
        pthread_mutex_unlock(&front->mutex);
    }
    PyBuffer_Release(&homes);
    PyBuffer_Release(&blocks);
    return front == NULL ? NULL : PyBool_FromLong(started);
}

static PyObject *front_stop(PyObject *module, PyObject *argument)
{
    (void)module;
    struct front *front = front_argument((int)PyLong_AsLong(argument));
    if (front == NULL)
        return NULL;
    pthread_mutex_lock(&front->mutex);
    front->on = 0;
    pthread_mutex_unlock(&front->mutex);
    Py_RETURN_NONE;
}

/* The front is off, so its blocks stay as they are while the GIL is held. */
static PyObject *front_blocks(PyObject *module, PyObject *argument)
{
    (void)module;
    struct front *front = front_argument((int)PyLong_AsLong(argument));
    if (front == NULL)
        return NULL;
    pthread_mutex_lock(&front->mutex);
    size_t count = 0;
    int on = front->on;
    for (uint32_t at = 0; at < front->capacity; at++)
        count += front->blocks[at].size > 0;
    pthread_mutex_unlock(&front->mutex);
    if (on) {
        PyErr_SetString(PyExc_RuntimeError, "the front is on");
        return NULL;
    }
    PyObject *bytes =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * WORDS_OF_A_BLOCK * sizeof(uint64_t)));
    if (bytes == NULL)
        return NULL;
    uint64_t *words = (uint64_t *)(void *)PyBytes_AS_STRING(bytes);
    for (uint32_t at = 0; at < front->capacity; at++) {
        for (uint32_t index = front->blocks[at].first ? at + 1 : 0; index != 0;) {
            const struct block *block = &front->blocks[index - 1];
            *words++ = block->address;
            *words++ = block->size;
            *words++ = block->requested;
            *words++ = (uint64_t)block->home << HOME_SHIFT | (block->first ? FIRST_BLOCK : 0u) |
                       block->state;
            index = block->after;
        }
    }
    return bytes;
}

static PyObject *front_read_log(PyObject *module, PyObject *arguments)
{
    (void)module;
    int device, everything;
    if (!PyArg_ParseTuple(arguments, "ip:front_read_log", &device, &everything))
        return NULL;
    struct front *front = front_argument(device);
    if (front == NULL)
        return NULL;
    pthread_mutex_lock(&front->mutex);
    uint32_t rows = everything || front->rows > LOG_ROWS / 2 ? front->rows : 0;
    pthread_mutex_unlock(&front->mutex);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(rows * sizeof *front->log));
    if (bytes == NULL || rows == 0)
        return bytes;
    /* Only those, in case that others come meanwhile. (The GIL is held: no other thread reads any.) */
    pthread_mutex_lock(&front->mutex);
    memcpy(PyBytes_AS_STRING(bytes), front->log, rows * sizeof *front->log);
    memmove(front->log, front->log + rows, (front->rows - rows) * sizeof *front->log);
    front->rows -= rows;
    pthread_mutex_unlock(&front->mutex);
    return bytes;
}

static PyObject *front_malloc(PyObject *module, PyObject *arguments)
{
    (void)module;
    int device;
    unsigned long long nbytes, size, pool, stream;
    if (!PyArg_ParseTuple(arguments, "iKKKK:front_malloc", &device, &nbytes, &size, &pool, &stream))
        return NULL;
    struct front *front = front_argument(device);
    if (front == NULL)
        return NULL;
    void *address = NULL;
    pthread_mutex_lock(&front->mutex);
    if (is_ready(front)) {
        uint64_t request = nbytes / front->unit + (nbytes % front->unit != 0);
        if (find(front, &front->by_request, request) == 0 &&
            reserve(front, &front->by_request, 1)) {
            if (front->by_request.used == MAX_PLANS)
                empty_table(&front->by_request);
            uint32_t index = (uint32_t)front->by_request.used + 1;
            front->plans[index - 1] = (struct plan){request, size, pool};
            insert_key(front, &front->by_request, request, index);
        }
        address = serve(front, nbytes, size, pool, stream);
    }
    pthread_mutex_unlock(&front->mutex);
    return PyLong_FromVoidPtr(address);
}

static PyObject *front_free(PyObject *module, PyObject *arguments)
{
    (void)module;
    int device;
    unsigned long long address;
    if (!PyArg_ParseTuple(arguments, "iK:front_free", &device, &address))
        return NULL;
    struct front *front = front_argument(device);
    if (front == NULL)
        return NULL;
    pthread_mutex_lock(&front->mutex);
    int done = release(front, address);
    pthread_mutex_unlock(&front->mutex);
    return PyBool_FromLong(done);
}

/* Another stream uses a block: Python must free it. Returns the stream that owns it, or None. */
static PyObject *front_share(PyObject *module, PyObject *arguments)
{
    (void)module;
    int device;
    unsigned long long address, stream, owner = 0;
    if (!PyArg_ParseTuple(arguments, "iKK:front_share", &device, &address, &stream))
        return NULL;
    struct front *front = front_argument(device);
    if (front == NULL)
        return NULL;
    pthread_mutex_lock(&front->mutex);
    uint32_t index = front->on ? find(front, &front->by_address, address) : 0;
    int state = index != 0 ? front->blocks[index - 1].state : KEPT_BLOCK;
    int known = state == LENT_BLOCK || state == SHARED_BLOCK;
    if (known) {
        owner = front->homes[front->blocks[index - 1].home].stream;
        if (owner != stream)
            front->blocks[index - 1].state = SHARED_BLOCK;
    }
    pthread_mutex_unlock(&front->mutex);
    if (!known)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(owner);
}

static PyObject *front_counts(PyObject *module, PyObject *argument)
{
    (void)module;
    struct front *front = front_argument((int)PyLong_AsLong(argument));
    if (front == NULL)
        return NULL;
    pthread_mutex_lock(&front->mutex);
    unsigned long long on = (unsigned long long)front->on, used = front->by_address.used;
    unsigned long long plans = front->by_request.used;
    pthread_mutex_unlock(&front->mutex);
    return Py_BuildValue("(KKK)", on, used, plans);
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
    /* Never released: PyTorch may call at any time. */
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
     "front_open(device, unit, zero_is_null): set the front of a device up. It is off."},
    {"front_start", front_start, METH_VARARGS,
     "front_start(device, rule, homes, blocks): serve these blocks from now on; whether it does."},
    {"front_stop", front_stop, METH_O, "front_stop(device): serve nothing from now on."},
    {"front_blocks", front_blocks, METH_O,
     "front_blocks(device): all blocks of a front that is off, each as in front_start."},
    {"front_read_log", front_read_log, METH_VARARGS,
     "front_read_log(device, everything): the rows since it was read last, if there are many."},
    {"front_malloc", front_malloc, METH_VARARGS,
     "front_malloc(device, nbytes, size, pool, stream): an address, or 0. The size and the pool are "
     "remembered for such requests."},
    {"front_free", front_free, METH_VARARGS, "front_free(device, address): whether it is freed."},
    {"front_share", front_share, METH_VARARGS,
     "front_share(device, address, stream): `stream` uses a block too; the owner's stream, or None "
     "if no block is lent there."},
    {"front_counts", front_counts, METH_O, "front_counts(device): on, blocks in use, plans."},
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
