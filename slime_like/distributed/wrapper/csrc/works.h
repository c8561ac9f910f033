/* Asynchronous ops that may be waited for, by the address of their work: a dict of {id(work): (weak work, tally, index)}
   to Python, of which it has the methods that slime_like.distributed uses. */

typedef struct {
    int64_t key;
    PyObject *ref; /* NULL: the slot is free */
    PyObject *tally;
    int64_t index;
} Issued;

typedef struct {
    PyObject_HEAD
    Issued *at;
    size_t size, used; /* slots, a power of two; at most half are used */
    int shift;         /* 64 minus the bits of a slot's index */
} Works;

static inline size_t home(const Works *self, int64_t key)
{
    return (size_t)((uint64_t)key * 0x9E3779B97F4A7C15u >> self->shift); /* Fibonacci hashing: Knuth 6.4 */
}

/* Return the slot of a key, or the free slot for it. */
static inline Issued *place_of(const Works *self, int64_t key)
{
    size_t i = home(self, key);
    while (self->at[i].ref != NULL && self->at[i].key != key) i = (i + 1) & (self->size - 1);
    return self->at + i;
}

static inline Issued *known(const Works *self, int64_t key)
{
    Issued *found = place_of(self, key);
    return found->ref == NULL ? NULL : found;
}

/* Empty a slot, whose references pass to the caller; displaced entries move back. Knuth 6.4, R. */
static void vacate(Works *self, Issued *gone)
{
    size_t mask = self->size - 1, hole = (size_t)(gone - self->at);
    for (size_t i = (hole + 1) & mask; self->at[i].ref != NULL; i = (i + 1) & mask)
        if (((i - home(self, self->at[i].key)) & mask) >= ((i - hole) & mask)) {
            self->at[hole] = self->at[i];
            hole = i;
        }
    self->at[hole].ref = NULL;
    self->used--;
}

/* Make room for one more; -1 with an error. */
static int make_room(Works *self)
{
    if (2 * (self->used + 1) <= self->size) return 0;
    Works more = {.size = self->size ? 2 * self->size : 64, .used = self->used, .shift = self->size ? self->shift - 1 : 58};
    if ((more.at = PyMem_Calloc(more.size, sizeof(Issued))) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < self->size; i++)
        if (self->at[i].ref != NULL) *place_of(&more, self->at[i].key) = self->at[i];
    PyMem_Free(self->at);
    self->at = more.at;
    self->size = more.size;
    self->shift = more.shift;
    return 0;
}

/* Convert an entry to Python; steals the references. */
static PyObject *told(PyObject *ref, PyObject *tally, int64_t index)
{
    return Py_BuildValue("(NNL)", ref, tally, (long long)index);
}

/* Store the address of a key in *key; -1 with an error. */
static int read_key(PyObject *given, int64_t *key)
{
    *key = PyLong_AsLongLong(given);
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
        if (self->at[i].ref != NULL) {
            Py_VISIT(self->at[i].ref);
            Py_VISIT(self->at[i].tally);
        }
    return 0;
}

static int Works_clear(Works *self)
{
    for (size_t i = 0; i < self->size;)
        if (self->at[i].ref != NULL) {
            Issued gone = self->at[i]; /* another may move to its slot */
            vacate(self, self->at + i);
            Py_DECREF(gone.ref);
            Py_DECREF(gone.tally);
        } else {
            i++;
        }
    return 0;
}

static void Works_dealloc(Works *self)
{
    PyObject_GC_UnTrack(self);
    Works_clear(self);
    PyMem_Free(self->at);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static Py_ssize_t Works_length(Works *self) { return (Py_ssize_t)self->used; }

static int Works_contains(Works *self, PyObject *given)
{
    int64_t key;
    return read_key(given, &key) ? -1 : known(self, key) != NULL;
}

static int Works_set(Works *self, PyObject *given, PyObject *value)
{
    int64_t key;
    long long index;
    PyObject *ref, *tally, *old_ref = NULL, *old_tally = NULL;
    if (value == NULL || !PyTuple_Check(value) || !PyArg_ParseTuple(value, "OOL", &ref, &tally, &index)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "works[key] = (weak work, tally, index)");
        return -1;
    }
    if (read_key(given, &key) || make_room(self)) return -1;
    Issued *at = place_of(self, key);
    if (at->ref == NULL) {
        self->used++;
    } else {
        old_ref = at->ref;
        old_tally = at->tally;
    }
    *at = (Issued){key, Py_NewRef(ref), Py_NewRef(tally), index};
    Py_XDECREF(old_ref);
    Py_XDECREF(old_tally);
    return 0;
}

/* (key, default=None) -> its entry; ``remove``: also delete it. */
static PyObject *look_up(Works *self, PyObject *const *args, Py_ssize_t n, int remove)
{
    int64_t key;
    if (n < 1 || n > 2) {
        PyErr_SetString(PyExc_TypeError, "a key, and what to return where there is none");
        return NULL;
    }
    if (read_key(args[0], &key)) return NULL;
    Issued *at = known(self, key);
    if (at == NULL) return Py_NewRef(n > 1 ? args[1] : Py_None);
    Issued found = *at;
    if (remove) {
        vacate(self, at);
    } else {
        Py_INCREF(found.ref);
        Py_INCREF(found.tally);
    }
    return told(found.ref, found.tally, found.index);
}

static PyObject *Works_get(Works *self, PyObject *const *args, Py_ssize_t n) { return look_up(self, args, n, 0); }

static PyObject *Works_pop(Works *self, PyObject *const *args, Py_ssize_t n) { return look_up(self, args, n, 1); }

static PyObject *Works_items(Works *self, PyObject *none)
{
    PyObject *all = PyList_New(0);
    for (size_t i = 0; all != NULL && i < self->size; i++) { /* creating objects may run code that changes the table */
        if (self->at[i].ref == NULL) continue;
        Issued one = self->at[i];
        PyObject *value = told(Py_NewRef(one.ref), Py_NewRef(one.tally), one.index);
        PyObject *item = value == NULL ? NULL : Py_BuildValue("(LN)", (long long)one.key, value);
        if (item == NULL || PyList_Append(all, item)) Py_CLEAR(all);
        Py_XDECREF(item);
    }
    return all;
}

static PyMethodDef Works_methods[] = {
    {"get", (PyCFunction)(void (*)(void))Works_get, METH_FASTCALL, "As a dict's."},
    {"pop", (PyCFunction)(void (*)(void))Works_pop, METH_FASTCALL, "As a dict's; None where there is none."},
    {"items", (PyCFunction)Works_items, METH_NOARGS, "A list of them."},
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
