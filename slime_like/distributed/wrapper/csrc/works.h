/* Asynchronous ops that nobody has waited for, in a hash table by the address of their work. To Python it is a dict
   {id(work): (weak reference to the work, counter, index in the ring)} with the methods that slime_like.distributed uses. */

typedef struct {
    int64_t key;
    PyObject *ref; /* weak reference to the work; NULL: the slot is free */
    PyObject *counter;
    int64_t index;
} PendingWork;

typedef struct {
    PyObject_HEAD
    PendingWork *slots;
    size_t size, used; /* number of slots, a power of two; at most half of them are used */
    int shift;         /* 64 minus the bits of a slot's index */
} Works;

/* Return the slot at which the search for a key starts. */
static inline size_t home_slot(const Works *self, int64_t key)
{
    return (size_t)((uint64_t)key * 0x9E3779B97F4A7C15u >> self->shift); /* Fibonacci hashing: Knuth 6.4 */
}

/* Return the slot of a key, or the free slot for it. */
static inline PendingWork *slot_of(const Works *self, int64_t key)
{
    size_t i = home_slot(self, key);
    while (self->slots[i].ref != NULL && self->slots[i].key != key) i = (i + 1) & (self->size - 1);
    return self->slots + i;
}

/* Return the slot of a key, or NULL. */
static inline PendingWork *find(const Works *self, int64_t key)
{
    PendingWork *slot = slot_of(self, key);
    return slot->ref == NULL ? NULL : slot;
}

/* Free a slot without releasing its references, and move displaced entries back. Knuth 6.4, R. */
static void free_slot(Works *self, PendingWork *slot)
{
    size_t mask = self->size - 1, hole = (size_t)(slot - self->slots);
    for (size_t i = (hole + 1) & mask; self->slots[i].ref != NULL; i = (i + 1) & mask)
        if (((i - home_slot(self, self->slots[i].key)) & mask) >= ((i - hole) & mask)) {
            self->slots[hole] = self->slots[i];
            hole = i;
        }
    self->slots[hole].ref = NULL;
    self->used--;
}

/* Grow the table, if necessary, so that one entry can be added; -1 with an error. */
static int make_room(Works *self)
{
    if (2 * (self->used + 1) <= self->size) return 0;
    Works bigger = {.size = 64, .used = self->used, .shift = 58};
    if (self->size) {
        bigger.size = 2 * self->size;
        bigger.shift = self->shift - 1;
    }
    if ((bigger.slots = PyMem_Calloc(bigger.size, sizeof(PendingWork))) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < self->size; i++)
        if (self->slots[i].ref != NULL) *slot_of(&bigger, self->slots[i].key) = self->slots[i];
    PyMem_Free(self->slots);
    self->slots = bigger.slots;
    self->size = bigger.size;
    self->shift = bigger.shift;
    return 0;
}

/* Return an entry as a tuple; steals the references. */
static PyObject *entry_tuple(PyObject *ref, PyObject *counter, int64_t index)
{
    return Py_BuildValue("(NNL)", ref, counter, (long long)index);
}

/* Store the address of a key in *key; -1 with an error. */
static int read_key(PyObject *object, int64_t *key)
{
    *key = PyLong_AsLongLong(object);
    return *key == -1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *Works_new(PyTypeObject *type, PyObject *args, PyObject *kw)
{
    Works *self = (Works *)type->tp_alloc(type, 0);
    if (self != NULL && make_room(self)) Py_CLEAR(self);
    return (PyObject *)self;
}

static int Works_traverse(Works *self, visitproc visit, void *arg)
{
    for (size_t i = 0; i < self->size; i++)
        if (self->slots[i].ref != NULL) {
            Py_VISIT(self->slots[i].ref);
            Py_VISIT(self->slots[i].counter);
        }
    return 0;
}

static int Works_clear(Works *self)
{
    for (size_t i = 0; i < self->size;)
        if (self->slots[i].ref != NULL) {
            PendingWork removed = self->slots[i]; /* a copy, because another entry may move to its slot */
            free_slot(self, self->slots + i);
            Py_DECREF(removed.ref);
            Py_DECREF(removed.counter);
        } else {
            i++;
        }
    return 0;
}

static void Works_dealloc(Works *self)
{
    PyObject_GC_UnTrack(self);
    Works_clear(self);
    PyMem_Free(self->slots);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static Py_ssize_t Works_length(Works *self) { return (Py_ssize_t)self->used; }

static int Works_contains(Works *self, PyObject *key_object)
{
    int64_t key;
    return read_key(key_object, &key) ? -1 : find(self, key) != NULL;
}

static int Works_set(Works *self, PyObject *key_object, PyObject *value)
{
    int64_t key;
    long long index;
    PyObject *ref, *counter, *old_ref = NULL, *old_counter = NULL;
    if (value == NULL || !PyTuple_Check(value) || !PyArg_ParseTuple(value, "OOL", &ref, &counter, &index)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "give works[key] = (weak reference to the work, counter, index)");
        return -1;
    }
    if (read_key(key_object, &key) || make_room(self)) return -1;
    PendingWork *slot = slot_of(self, key);
    if (slot->ref == NULL) {
        self->used++;
    } else {
        old_ref = slot->ref;
        old_counter = slot->counter;
    }
    *slot = (PendingWork){key, Py_NewRef(ref), Py_NewRef(counter), index};
    Py_XDECREF(old_ref);
    Py_XDECREF(old_counter);
    return 0;
}

/* Return the entry of args[0], else args[1] or None; ``remove``: also delete the entry. */
static PyObject *look_up(Works *self, PyObject *const *args, Py_ssize_t n, int remove)
{
    int64_t key;
    if (n < 1 || n > 2) {
        PyErr_SetString(PyExc_TypeError, "give a key and, optionally, a default value");
        return NULL;
    }
    if (read_key(args[0], &key)) return NULL;
    PendingWork *slot = find(self, key);
    if (slot == NULL) return Py_NewRef(n > 1 ? args[1] : Py_None);
    PendingWork entry = *slot;
    if (remove) {
        free_slot(self, slot);
    } else {
        Py_INCREF(entry.ref);
        Py_INCREF(entry.counter);
    }
    return entry_tuple(entry.ref, entry.counter, entry.index);
}

static PyObject *Works_get(Works *self, PyObject *const *args, Py_ssize_t n) { return look_up(self, args, n, 0); }

static PyObject *Works_pop(Works *self, PyObject *const *args, Py_ssize_t n) { return look_up(self, args, n, 1); }

static PyObject *Works_items(Works *self, PyObject *none)
{
    PyObject *items = PyList_New(0);
    for (size_t i = 0; items != NULL && i < self->size; i++) { /* creating objects may run code that changes the table */
        if (self->slots[i].ref == NULL) continue;
        PendingWork entry = self->slots[i];
        PyObject *value = entry_tuple(Py_NewRef(entry.ref), Py_NewRef(entry.counter), entry.index);
        PyObject *item = value == NULL ? NULL : Py_BuildValue("(LN)", (long long)entry.key, value);
        if (item == NULL || PyList_Append(items, item)) Py_CLEAR(items);
        Py_XDECREF(item);
    }
    return items;
}

static PyMethodDef Works_methods[] = {
    {"get", (PyCFunction)(void (*)(void))Works_get, METH_FASTCALL, "Return the entry of a key, else the default."},
    {"pop", (PyCFunction)(void (*)(void))Works_pop, METH_FASTCALL,
     "Remove and return the entry of a key, else return the default (None)."},
    {"items", (PyCFunction)Works_items, METH_NOARGS, "Return a list of (key, entry)."},
    {NULL},
};

static PyMappingMethods Works_mapping = {
    .mp_length = (lenfunc)Works_length,
    .mp_ass_subscript = (objobjargproc)Works_set,
};

static PySequenceMethods Works_sequence = {.sq_contains = (objobjproc)Works_contains};

static PyTypeObject WorksType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "slime_like.distributed.wrapper._hot.Works",
    .tp_basicsize = sizeof(Works),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)Works_traverse,
    .tp_clear = (inquiry)Works_clear,
    .tp_dealloc = (destructor)Works_dealloc,
    .tp_methods = Works_methods,
    .tp_as_mapping = &Works_mapping,
    .tp_as_sequence = &Works_sequence,
    .tp_new = Works_new,
};
