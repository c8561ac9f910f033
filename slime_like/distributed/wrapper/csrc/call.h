/* Replacement of a method or function, and the code shared by all kinds. */

enum { COLLECTIVE, POINT, WAIT, COMPOSITE };

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Ring *ring;
    PyObject *slow;        /* the Python function */
    PyObject *raw;         /* torch's */
    PyObject *table;       /* group -> Tally, of this op */
    Works *loose;
    PyObject *wait;        /* torch's Work.wait */
    PyObject *failed;      /* (tally, index, error) -> what to raise */
    PyObject *outstanding; /* (work, tally, index, started) -> work */
    PyObject *size;        /* (value) -> bytes */
    PyObject *world;       /* torch's, which knows the default group */
    PyTypeObject *tensor;
    PyTypeObject *counter; /* type of the tables' values; a Tally */
    PyObject *nbytes;      /* the tensor's attribute, and its getter if it is implemented in C */
    getter read_nbytes;
    PyObject *dict;
    Py_ssize_t payload; /* index of the argument whose bytes count (composite: of the group); or -1 */
    Py_ssize_t purge_at;
    int kind, anyone;
} Call;

#define CALL_OBJECTS(DO) \
    DO(slow) DO(raw) DO(table) DO(loose) DO(wait) DO(failed) DO(outstanding) DO(size) \
    DO(world) DO(tensor) DO(counter) DO(nbytes) DO(ring) DO(dict)

static int Call_traverse(Call *self, visitproc visit, void *arg)
{
#define VISIT(field) Py_VISIT(self->field);
    CALL_OBJECTS(VISIT)
    return 0;
}

static int Call_clear(Call *self)
{
#define CLEAR(field) Py_CLEAR(self->field);
    CALL_OBJECTS(CLEAR)
    return 0;
}

static void Call_dealloc(Call *self)
{
    PyObject_GC_UnTrack(self);
    Call_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Call_get(PyObject *self, PyObject *object, PyObject *type)
{
    return object == NULL || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

/* Bytes of a tensor, or of a list; -1 with an error. */
static int64_t bytes_of(Call *self, PyObject *value)
{
    if (PyList_CheckExact(value) && PyList_GET_SIZE(value) == 1) value = PyList_GET_ITEM(value, 0);
    Py_INCREF(value);
    PyObject *size = self->read_nbytes != NULL && Py_IS_TYPE(value, self->tensor)
                         ? self->read_nbytes(value, NULL)
                         : PyObject_CallOneArg(self->size, value);
    Py_DECREF(value);
    if (size == NULL) return -1;
    int64_t found = PyLong_AsLongLong(size);
    Py_DECREF(size);
    return found;
}

/* Return the counter of a group if its op is plain, a new reference; else NULL. */
static Tally *plain(Call *self, PyObject *group, int64_t started)
{
    if (self->ring->words == NULL) return NULL;
    PyObject *found = PyDict_GetItemWithError(self->table, group);
    if (found == NULL || !Py_IS_TYPE(found, self->counter)) {
        PyErr_Clear(); /* the Python function raises it again */
        return NULL;
    }
    Tally *tally = (Tally *)found;
    if (self->ring->word != NULL && *(volatile const int64_t *)self->ring->word != self->ring->seen)
        tally->due = 0; /* so that the guard runs, which sets it again */
    if (tally->target == NULL || tally->next == NULL || tally->peers == NULL || (double)started >= tally->due) return NULL;
    return (Tally *)Py_NewRef(found);
}

/* Raise the error that ``failed`` returns for the current error. */
static PyObject *fail(Call *self, PyObject *tally, int64_t index)
{
    PyObject *error = PyErr_GetRaisedException(), *number = PyLong_FromLongLong(index), *told = NULL;
    if (number != NULL) {
        PyObject *given[] = {tally, number, error};
        told = PyObject_Vectorcall(self->failed, given, 3, NULL);
        Py_DECREF(number);
    }
    if (told != NULL && PyExceptionInstance_Check(told)) {
        PyErr_SetRaisedException(told);
        Py_DECREF(error);
    } else {
        Py_XDECREF(told);
        if (!PyErr_Occurred()) PyErr_SetRaisedException(error);
        else Py_DECREF(error);
    }
    return NULL;
}

/* Call torch's method with the same arguments except the group. */
static PyObject *issue(Call *self, PyObject *target, PyObject *const *args, Py_ssize_t all, Py_ssize_t n, PyObject *names)
{
    PyObject *given[8];
    given[1] = target;
    for (Py_ssize_t i = 1; i < all; i++) given[i + 1] = args[i];
    return PyObject_Vectorcall(self->raw, given + 1, n | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
}

/* Record a work that may be waited for and return it; steals its reference. */
static PyObject *keep(Call *self, PyObject *work, Tally *tally, int64_t index, int64_t started)
{
    int64_t key = (int64_t)(intptr_t)work;
    PyObject *ref = PyWeakref_NewRef(work, NULL), *result = NULL; /* before the slot is searched, because this may collect garbage */
    if (ref != NULL && make_room(self->loose) == 0) {
        Issued *at = place_of(self->loose, key);
        if (at->ref == NULL && (Py_ssize_t)self->loose->used <= self->purge_at) {
            *at = (Issued){key, ref, Py_NewRef((PyObject *)tally), index};
            self->loose->used++;
            tally->ns += now() - started;
            return work;
        }
        PyObject *number = PyLong_FromLongLong(index), *since = PyLong_FromLongLong(started);
        if (number != NULL && since != NULL) {
            PyObject *given[] = {work, (PyObject *)tally, number, since};
            result = PyObject_Vectorcall(self->outstanding, given, 4, NULL);
        }
        Py_XDECREF(number);
        Py_XDECREF(since);
    }
    Py_XDECREF(ref);
    Py_DECREF(work);
    return result;
}
