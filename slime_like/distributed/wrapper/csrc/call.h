/* Call: the replacement of a method or function of torch, and the code shared by all kinds of calls. */

enum { COLLECTIVE, POINT, WAIT, COMPOSITE };

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Ring *ring;
    PyObject *fallback;       /* the wrapper in Python */
    PyObject *raw;            /* torch's method or function */
    PyObject *counters;       /* group -> HotCounterFields, of this op */
    Works *works;             /* asynchronous ops that nobody has waited for */
    PyObject *wait;           /* torch's Work.wait */
    PyObject *record_failure; /* (counter, index, error) -> error to raise */
    PyObject *add_pending;    /* (work, counter, index, started) -> work */
    PyObject *size_of;        /* (tensor or list) -> bytes */
    PyObject *world;          /* torch's registry, with the default group */
    PyTypeObject *tensor;
    PyTypeObject *counter_class; /* type of the values of ``counters``; a subtype of HotCounterFields */
    PyObject *nbytes;         /* descriptor of the tensor's attribute */
    getter read_nbytes;       /* its getter, or NULL if it is not implemented in C */
    PyObject *dict;
    Py_ssize_t payload; /* index of the argument whose bytes are counted, for a composite that of the group; -1: none */
    Py_ssize_t max_pending; /* with more entries in ``works``, add_pending is called, which removes deleted works */
    int kind, any_source;
} Call;

#define CALL_OBJECTS(DO) \
    DO(fallback) DO(raw) DO(counters) DO(works) DO(wait) DO(record_failure) DO(add_pending) DO(size_of) \
    DO(world) DO(tensor) DO(counter_class) DO(nbytes) DO(ring) DO(dict)

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

/* Return the bytes of a tensor or list; -1 with an error. */
static int64_t bytes_of(Call *self, PyObject *value)
{
    if (PyList_CheckExact(value) && PyList_GET_SIZE(value) == 1) value = PyList_GET_ITEM(value, 0);
    Py_INCREF(value);
    PyObject *size = self->read_nbytes != NULL && Py_IS_TYPE(value, self->tensor)
                         ? self->read_nbytes(value, NULL)
                         : PyObject_CallOneArg(self->size_of, value);
    Py_DECREF(value);
    if (size == NULL) return -1;
    int64_t num_bytes = PyLong_AsLongLong(size);
    Py_DECREF(size);
    return num_bytes;
}

/* Return the counter of a group as a new reference if this file can handle the call; else NULL. */
static HotCounterFields *plain_counter(Call *self, PyObject *group, int64_t started)
{
    if (self->ring->words == NULL) return NULL;
    PyObject *counter = PyDict_GetItemWithError(self->counters, group);
    if (counter == NULL || !Py_IS_TYPE(counter, self->counter_class)) {
        PyErr_Clear(); /* the Python function raises it again */
        return NULL;
    }
    HotCounterFields *fields = (HotCounterFields *)counter;
    const int64_t *request = self->ring->request_word;
    if (request != NULL && *(volatile const int64_t *)request != self->ring->last_request)
        fields->check_at = 0; /* lets the guard run, which sets it again */
    if (fields->target == NULL || fields->next_sequence == NULL || fields->peers == NULL || (double)started >= fields->check_at)
        return NULL;
    return (HotCounterFields *)Py_NewRef(counter);
}

/* Raise the error that ``record_failure`` returns for the current error. Return NULL. */
static PyObject *fail(Call *self, PyObject *counter, int64_t index)
{
    PyObject *error = PyErr_GetRaisedException(), *index_object = PyLong_FromLongLong(index), *explained = NULL;
    if (index_object != NULL) {
        PyObject *arguments[] = {counter, index_object, error};
        explained = PyObject_Vectorcall(self->record_failure, arguments, 3, NULL);
        Py_DECREF(index_object);
    }
    if (explained != NULL && PyExceptionInstance_Check(explained)) {
        PyErr_SetRaisedException(explained);
        Py_DECREF(error);
    } else {
        Py_XDECREF(explained);
        if (!PyErr_Occurred()) PyErr_SetRaisedException(error);
        else Py_DECREF(error);
    }
    return NULL;
}

/* Call torch's method with ``target`` in place of the group; ``n`` of the arguments are positional. */
static PyObject *issue(Call *self, PyObject *target, PyObject *const *args, Py_ssize_t num_args, Py_ssize_t n, PyObject *names)
{
    PyObject *arguments[8];
    arguments[1] = target;
    for (Py_ssize_t i = 1; i < num_args; i++) arguments[i + 1] = args[i];
    return PyObject_Vectorcall(self->raw, arguments + 1, n | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
}

/* Add the work of an asynchronous op to ``works`` and return it; steals its reference. */
static PyObject *add_work(Call *self, PyObject *work, HotCounterFields *counter, int64_t index, int64_t started)
{
    int64_t key = (int64_t)(intptr_t)work;
    PyObject *ref = PyWeakref_NewRef(work, NULL), *result = NULL; /* before the search for the slot, because it may collect garbage */
    if (ref != NULL && make_room(self->works) == 0) {
        PendingWork *slot = slot_of(self->works, key);
        if (slot->ref == NULL && (Py_ssize_t)self->works->used <= self->max_pending) {
            *slot = (PendingWork){key, ref, Py_NewRef((PyObject *)counter), index};
            self->works->used++;
            counter->ns += now() - started;
            return work;
        }
        PyObject *index_object = PyLong_FromLongLong(index), *start = PyLong_FromLongLong(started);
        if (index_object != NULL && start != NULL) {
            PyObject *arguments[] = {work, (PyObject *)counter, index_object, start};
            result = PyObject_Vectorcall(self->add_pending, arguments, 4, NULL);
        }
        Py_XDECREF(index_object);
        Py_XDECREF(start);
    }
    Py_XDECREF(ref);
    Py_DECREF(work);
    return result;
}
