/* The plain case of an op in C: what slime_like.distributed.calls does, in a quarter of the time.

   An op is plain where its counter is known, the guard is not due, and its arguments are those that torch gives. All
   other calls, and all errors, go to the Python function that each object has beside it; that function alone says what
   an op means, and tests hold both against each other. Everything here runs under the interpreter's lock. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

enum { INDEX, STARTED, ENDED, BYTES, CODE, SEQUENCE, PEER, WIDTH }; /* words of a record: slime_like.distributed.ring */
enum { NO_PEER = -2, ANY_PEER = -1 };

static PyObject *name_async, *name_nbytes, *name_opts, *name_group, *name_default, *any_peer, *no_peer;

static inline int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t); /* what time.perf_counter_ns reads */
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- Tally: the part of a counter that changes with every op ------------------------------------------------------ */
typedef struct {
    PyObject_HEAD
    long long calls, bytes, ns, code;
    double due;
    PyObject *target, *next, *peers;
} Tally;

static int Tally_traverse(Tally *self, visitproc visit, void *arg)
{
    Py_VISIT(self->target);
    Py_VISIT(self->next);
    Py_VISIT(self->peers);
    return 0;
}

static int Tally_clear(Tally *self)
{
    Py_CLEAR(self->target);
    Py_CLEAR(self->next);
    Py_CLEAR(self->peers);
    return 0;
}

static void Tally_dealloc(Tally *self)
{
    PyObject_GC_UnTrack(self);
    Tally_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef Tally_members[] = {
    {"calls", T_LONGLONG, offsetof(Tally, calls)},   {"bytes", T_LONGLONG, offsetof(Tally, bytes)},
    {"ns", T_LONGLONG, offsetof(Tally, ns)},         {"code", T_LONGLONG, offsetof(Tally, code)},
    {"due", T_DOUBLE, offsetof(Tally, due)},         {"target", T_OBJECT, offsetof(Tally, target)},
    {"next", T_OBJECT, offsetof(Tally, next)},       {"peers", T_OBJECT, offsetof(Tally, peers)},
    {NULL},
};

static PyTypeObject TallyType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "slime_like.distributed._hot.Tally",
    .tp_basicsize = sizeof(Tally),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)Tally_traverse,
    .tp_clear = (inquiry)Tally_clear,
    .tp_dealloc = (destructor)Tally_dealloc,
    .tp_members = Tally_members,
    .tp_new = PyType_GenericNew,
};

/* ---- Ring: where records go ---------------------------------------------------------------------------------------- */
typedef struct {
    PyObject_HEAD
    Py_buffer buffer;
    int64_t *words; /* of the first record; NULL once closed */
    int64_t slots, index, head;
    Py_buffer request;   /* a word that other ranks write, or none */
    const int64_t *word;
    long long seen;      /* what it said when it was looked at last */
    long long composing; /* thread that is in a composite, or 0 */
} Ring;

static int Ring_init(Ring *self, PyObject *args, PyObject *kw)
{
    PyObject *memory;
    long long head, slots;
    if (self->words != NULL || kw != NULL || !PyArg_ParseTuple(args, "OLL", &memory, &head, &slots)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "Ring(memory, head, slots), once");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &self->buffer, PyBUF_WRITABLE)) return -1;
    if (slots < 1 || slots & (slots - 1) || head < 0 || head % 8
        || (int64_t)self->buffer.len < head + slots * WIDTH * 8) {
        PyBuffer_Release(&self->buffer);
        PyErr_SetString(PyExc_ValueError, "the memory does not hold so many records");
        return -1;
    }
    self->words = (int64_t *)((char *)self->buffer.buf + head);
    self->slots = slots;
    self->head = head / 8;
    return 0;
}

static PyObject *Ring_close(Ring *self, PyObject *none)
{
    if (self->words != NULL) {
        self->words = NULL;
        PyBuffer_Release(&self->buffer);
    }
    if (self->word != NULL) {
        self->word = NULL;
        PyBuffer_Release(&self->request);
    }
    Py_RETURN_NONE;
}

static PyObject *Ring_watch(Ring *self, PyObject *memory)
{
    if (self->word != NULL || PyObject_GetBuffer(memory, &self->request, PyBUF_WRITABLE)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a word is watched already");
        return NULL;
    }
    if (self->request.len < 8) {
        PyBuffer_Release(&self->request);
        PyErr_SetString(PyExc_ValueError, "no word");
        return NULL;
    }
    self->word = self->request.buf;
    Py_RETURN_NONE;
}

static PyObject *Ring_take(Ring *self, PyObject *none)
{
    int64_t index = self->index++, word = self->head + (index & (self->slots - 1)) * WIDTH;
    return Py_BuildValue("(LLL)", (long long)index, (long long)(word * 8), (long long)(word + ENDED));
}

static void Ring_dealloc(Ring *self)
{
    Py_XDECREF(Ring_close(self, NULL));
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static inline int64_t record(Ring *ring, int64_t started, int64_t size, int64_t code, int64_t sequence, int64_t peer)
{
    int64_t index = ring->index++;
    if (ring->words == NULL) return index; /* closed by another thread meanwhile */
    int64_t *at = ring->words + (index & (ring->slots - 1)) * WIDTH;
    at[INDEX] = index;
    at[STARTED] = started;
    at[ENDED] = 0;
    at[BYTES] = size;
    at[CODE] = code;
    at[SEQUENCE] = sequence;
    at[PEER] = peer;
    return index;
}

static inline void ended(Ring *ring, int64_t index, int64_t when)
{
    if (ring->words == NULL) return;
    int64_t *at = ring->words + (index & (ring->slots - 1)) * WIDTH;
    if (at[INDEX] == index) at[ENDED] = when; /* else its place is taken by a later one */
}

static PyMethodDef Ring_methods[] = {
    {"take", (PyCFunction)Ring_take, METH_NOARGS, "Number of the next op, byte of its record, word that says when it ended."},
    {"watch", (PyCFunction)Ring_watch, METH_O, "Ops are due while the word of this memory is not ``seen``."},
    {"close", (PyCFunction)Ring_close, METH_NOARGS, "Let go of the memory; later ops go to Python."},
    {NULL},
};

static PyMemberDef Ring_members[] = {
    {"seen", T_LONGLONG, offsetof(Ring, seen)},
    {"composing", T_LONGLONG, offsetof(Ring, composing)},
    {NULL},
};

static PyTypeObject RingType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "slime_like.distributed._hot.Ring",
    .tp_basicsize = sizeof(Ring),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)Ring_dealloc,
    .tp_methods = Ring_methods,
    .tp_members = Ring_members,
    .tp_init = (initproc)Ring_init,
    .tp_new = PyType_GenericNew,
};

/* ---- Call: what stands in the place of a method --------------------------------------------------------------------- */
enum { COLLECTIVE, POINT, WAIT, COMPOSITE };

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Ring *ring;
    PyObject *slow;        /* the Python function */
    PyObject *raw;         /* torch's */
    PyObject *table;       /* group -> Tally, of this op */
    PyObject *loose;       /* id(work) -> (weak work, Tally, index) */
    PyObject *wait;        /* torch's Work.wait */
    PyObject *failed;      /* (tally, index, error) -> what to raise */
    PyObject *outstanding; /* (work, tally, index, started) -> work */
    PyObject *size;        /* (value) -> bytes, of what is no tensor */
    PyObject *world;       /* torch's, which knows the default group */
    PyTypeObject *tensor;
    PyObject *dict;
    Py_ssize_t payload; /* the argument whose bytes count, of a composite the one that is the group; or -1 */
    Py_ssize_t purge_at;
    int kind, anyone;
} Call;

#define CALL_OBJECTS(DO) \
    DO(slow) DO(raw) DO(table) DO(loose) DO(wait) DO(failed) DO(outstanding) DO(size) \
    DO(world) DO(tensor) DO(ring) DO(dict)

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
    PyObject *size = Py_IS_TYPE(value, self->tensor) ? PyObject_GetAttr(value, name_nbytes)
                                                     : PyObject_CallOneArg(self->size, value);
    Py_DECREF(value);
    if (size == NULL) return -1;
    int64_t found = PyLong_AsLongLong(size);
    Py_DECREF(size);
    return found;
}

/* What a function without arguments counts to; -1 with an error. */
static int64_t count(PyObject *next)
{
    PyObject *number = PyObject_CallNoArgs(next);
    if (number == NULL) return -1;
    int64_t found = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return found;
}

/* The counter of a group whose op is plain, a new reference; NULL where it is not. */
static Tally *plain(Call *self, PyObject *group, int64_t started)
{
    if (self->ring->words == NULL) return NULL;
    PyObject *found = PyDict_GetItemWithError(self->table, group);
    if (found == NULL || !PyObject_TypeCheck(found, &TallyType)) {
        PyErr_Clear(); /* the Python function finds it again */
        return NULL;
    }
    Tally *tally = (Tally *)found;
    if (self->ring->word != NULL && *(volatile const int64_t *)self->ring->word != self->ring->seen)
        tally->due = 0; /* so that the guard is asked, which sets it anew */
    if (tally->target == NULL || tally->next == NULL || tally->peers == NULL || (double)started >= tally->due) return NULL;
    return (Tally *)Py_NewRef(found);
}

/* Raise what ``failed`` makes of the error that was raised. */
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

/* torch's method with the same arguments, but the group. */
static PyObject *issue(Call *self, PyObject *target, PyObject *const *args, Py_ssize_t all, Py_ssize_t n, PyObject *names)
{
    PyObject *given[8];
    given[1] = target;
    for (Py_ssize_t i = 1; i < all; i++) given[i + 1] = args[i];
    return PyObject_Vectorcall(self->raw, given + 1, n | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
}

/* Remember a work that may be waited for; its reference passes on. */
static PyObject *keep(Call *self, PyObject *work, Tally *tally, int64_t index, int64_t started)
{
    PyObject *key = PyLong_FromVoidPtr(work), *number = PyLong_FromLongLong(index), *ref = NULL, *issued = NULL;
    int known = key == NULL || number == NULL ? -1 : PyDict_Contains(self->loose, key);
    PyObject *result = NULL;
    if (known > 0 || (known == 0 && PyDict_GET_SIZE(self->loose) > self->purge_at)) {
        PyObject *since = PyLong_FromLongLong(started);
        if (since != NULL) {
            PyObject *given[] = {work, (PyObject *)tally, number, since};
            result = PyObject_Vectorcall(self->outstanding, given, 4, NULL);
            Py_DECREF(since);
        }
    } else if (known == 0 && (ref = PyWeakref_NewRef(work, NULL)) != NULL
               && (issued = PyTuple_Pack(3, ref, (PyObject *)tally, number)) != NULL
               && PyDict_SetItem(self->loose, key, issued) == 0) {
        tally->ns += now() - started;
        result = Py_NewRef(work);
    }
    Py_XDECREF(key);
    Py_XDECREF(number);
    Py_XDECREF(ref);
    Py_XDECREF(issued);
    Py_DECREF(work);
    return result;
}

/* Whether the caller waits itself: opts.asyncOp, and where there is none. */
static int asynchronous(PyObject *opts)
{
    PyObject *flag = PyObject_GetAttr(opts, name_async);
    if (flag == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 1;
    }
    int is = flag == Py_True ? 1 : flag == Py_False ? 0 : PyObject_IsTrue(flag);
    Py_DECREF(flag);
    return is;
}

static PyObject *call_collective(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Call *self = (Call *)callable;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf), named = names == NULL ? 0 : PyTuple_GET_SIZE(names), all = n + named;
    int64_t started = now(), size = 0;
    Tally *tally;
    if (all < 2 || all > 4 || named > 1 || (named && PyUnicode_Compare(PyTuple_GET_ITEM(names, 0), name_opts))
        || 1 + self->payload >= all || (tally = plain(self, args[0], started)) == NULL)
        return PyObject_Vectorcall(self->slow, args, nargsf, names);
    PyObject *opts = args[all - 1], *work = NULL, *result = NULL;
    if (self->payload >= 0 && (size = bytes_of(self, args[1 + self->payload])) < 0) goto done;
    int64_t sequence = count(tally->next);
    if (sequence < 0) goto done;
    tally->calls++;
    tally->bytes += size;
    int64_t index = record(self->ring, started, size, tally->code, sequence, NO_PEER);
    PyObject *target = Py_NewRef(tally->target);
    work = issue(self, target, args, all, n, names);
    Py_DECREF(target);
    if (work == NULL) {
        fail(self, (PyObject *)tally, index);
        goto done;
    }
    if (work != Py_None) {
        int later = asynchronous(opts);
        if (later > 0) {
            result = keep(self, work, tally, index, started);
            goto done;
        }
        PyObject *waited = later < 0 ? NULL : PyObject_CallOneArg(self->wait, work);
        if (waited == NULL) {
            fail(self, (PyObject *)tally, index);
            Py_DECREF(work);
            goto done;
        }
        Py_DECREF(waited);
    }
    Py_DECREF(work);
    int64_t when = now();
    ended(self->ring, index, when);
    tally->ns += when - started;
    result = Py_NewRef(Py_None); /* torch takes it for a backend that has waited itself */
done:
    Py_DECREF(tally);
    return result;
}

static PyObject *call_point(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Call *self = (Call *)callable;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    int64_t started = now(), size = 0, peer = NO_PEER;
    PyObject *key = self->payload < 0 ? no_peer : self->anyone ? any_peer : n > 2 ? args[2] : NULL, *next, *result = NULL;
    Tally *tally;
    if (names != NULL || n < 2 || n > 4 || key == NULL || !PyLong_CheckExact(key)
        || (tally = plain(self, args[0], started)) == NULL)
        return PyObject_Vectorcall(self->slow, args, nargsf, names);
    if ((next = PyDict_GetItemWithError(tally->peers, key)) == NULL) { /* the first with this peer */
        Py_DECREF(tally);
        PyErr_Clear();
        return PyObject_Vectorcall(self->slow, args, nargsf, names);
    }
    if (self->payload >= 0 && (size = bytes_of(self, args[1])) < 0) goto done;
    peer = PyLong_AsLongLong(key);
    int64_t sequence = count(next);
    if (sequence < 0 || (peer == -1 && PyErr_Occurred())) goto done;
    tally->calls++;
    tally->bytes += size;
    int64_t index = record(self->ring, started, size, tally->code, sequence, peer);
    PyObject *target = Py_NewRef(tally->target), *work = issue(self, target, args, n, n, NULL);
    Py_DECREF(target);
    if (work == NULL) {
        fail(self, (PyObject *)tally, index);
    } else if (work == Py_None) {
        int64_t when = now();
        ended(self->ring, index, when);
        tally->ns += when - started;
        result = work;
    } else {
        result = keep(self, work, tally, index, started);
    }
done:
    Py_DECREF(tally);
    return result;
}

static PyObject *call_wait(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Call *self = (Call *)callable;
    PyObject *key = PyVectorcall_NARGS(nargsf) < 1 ? NULL : PyLong_FromVoidPtr(args[0]), *issued = NULL;
    if (key != NULL && (issued = PyDict_GetItemWithError(self->loose, key)) != NULL) Py_INCREF(issued);
    if (issued == NULL || !PyTuple_CheckExact(issued) || PyTuple_GET_SIZE(issued) != 3
        || !PyWeakref_Check(PyTuple_GET_ITEM(issued, 0)) || PyWeakref_GetObject(PyTuple_GET_ITEM(issued, 0)) != args[0]
        || !PyObject_TypeCheck(PyTuple_GET_ITEM(issued, 1), &TallyType)) {
        Py_XDECREF(issued);
        Py_XDECREF(key);
        if (key == NULL || PyErr_Occurred()) PyErr_Clear();
        return PyObject_Vectorcall(issued == NULL ? self->raw : self->slow, args, nargsf, names);
    }
    Tally *tally = (Tally *)PyTuple_GET_ITEM(issued, 1);
    int64_t index = PyLong_AsLongLong(PyTuple_GET_ITEM(issued, 2)), started = now();
    int dropped = PyDict_DelItem(self->loose, key);
    Py_DECREF(key);
    if (dropped) PyErr_Clear();
    PyObject *done = PyObject_Vectorcall(self->raw, args, nargsf, names);
    if (done == NULL) {
        fail(self, (PyObject *)tally, index);
    } else {
        int64_t when = now();
        ended(self->ring, index, when);
        tally->ns += when - started;
    }
    Py_DECREF(issued);
    return done;
}

/* The group that a composite is given, a new reference; NULL, without an error, where it is not seen at once. */
static PyObject *group_of(Call *self, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    PyObject *group = NULL;
    if (self->payload < 0) { /* a batch, all of one group */
        if (n < 1 || !PyList_CheckExact(args[0]) || PyList_GET_SIZE(args[0]) == 0) return NULL;
        if ((group = PyObject_GetAttr(PyList_GET_ITEM(args[0], 0), name_group)) == NULL) PyErr_Clear();
    } else {
        if (self->payload < n) group = args[self->payload];
        for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++)
            if (PyUnicode_Compare(PyTuple_GET_ITEM(names, i), name_group) == 0) group = args[n + i];
        group = Py_NewRef(group == NULL ? Py_None : group);
    }
    if (group == Py_None) {
        Py_DECREF(group);
        if ((group = PyObject_GetAttr(self->world, name_default)) == NULL) PyErr_Clear();
    }
    return group;
}

static PyObject *call_composite(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Call *self = (Call *)callable;
    int64_t started = now();
    PyObject *group = group_of(self, args, PyVectorcall_NARGS(nargsf), names);
    Tally *tally = group == NULL ? NULL : plain(self, group, started);
    Py_XDECREF(group);
    if (tally == NULL) return PyObject_Vectorcall(self->slow, args, nargsf, names);
    long long outer = self->ring->composing;
    self->ring->composing = (long long)PyThread_get_thread_ident();
    tally->calls++;
    int64_t index = record(self->ring, started, 0, tally->code, tally->calls, NO_PEER);
    PyObject *done = PyObject_Vectorcall(self->raw, args, nargsf, names);
    if (done == NULL) fail(self, (PyObject *)tally, index);
    /* only one's own: another thread's may have ended meanwhile */
    self->ring->composing = outer == (long long)PyThread_get_thread_ident() ? outer : 0;
    int64_t when = now();
    if (done != NULL) ended(self->ring, index, when);
    tally->ns += when - started;
    Py_DECREF(tally);
    return done;
}

static int Call_init(Call *self, PyObject *args, PyObject *kw)
{
    static char *names[] = {"kind", "slow", "raw", "table", "ring", "loose", "wait", "failed", "outstanding", "size",
                            "world", "tensor", "payload", "anyone", "purge_at", NULL};
    static const vectorcallfunc kinds[] = {call_collective, call_point, call_wait, call_composite};
    PyObject *slow, *raw, *table, *ring, *loose, *wait, *failed, *outstanding, *size, *world, *tensor;
    if (self->slow != NULL) {
        PyErr_SetString(PyExc_TypeError, "a Call is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kw, "iOOO!O!O!OOOOOO!npn", names, &self->kind, &slow, &raw, &PyDict_Type, &table,
                                     &RingType, &ring, &PyDict_Type, &loose, &wait, &failed, &outstanding, &size,
                                     &world, &PyType_Type, &tensor, &self->payload, &self->anyone, &self->purge_at))
        return -1;
    if (self->kind < COLLECTIVE || self->kind > COMPOSITE) {
        PyErr_SetString(PyExc_ValueError, "no such kind");
        return -1;
    }
    self->vectorcall = kinds[self->kind];
    self->slow = Py_NewRef(slow);
    self->raw = Py_NewRef(raw);
    self->table = Py_NewRef(table);
    self->ring = (Ring *)Py_NewRef(ring);
    self->loose = Py_NewRef(loose);
    self->wait = Py_NewRef(wait);
    self->failed = Py_NewRef(failed);
    self->outstanding = Py_NewRef(outstanding);
    self->size = Py_NewRef(size);
    self->world = Py_NewRef(world);
    self->tensor = (PyTypeObject *)Py_NewRef(tensor);
    return 0;
}

static PyGetSetDef Call_getset[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict}, {NULL}};

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "slime_like.distributed._hot.Call",
    .tp_basicsize = sizeof(Call),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_vectorcall_offset = offsetof(Call, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = Call_get,
    .tp_getset = Call_getset,
    .tp_dictoffset = offsetof(Call, dict),
    .tp_traverse = (traverseproc)Call_traverse,
    .tp_clear = (inquiry)Call_clear,
    .tp_dealloc = (destructor)Call_dealloc,
    .tp_init = (initproc)Call_init,
    .tp_new = PyType_GenericNew,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_hot", .m_size = -1};

PyMODINIT_FUNC PyInit__hot(void)
{
    name_async = PyUnicode_InternFromString("asyncOp");
    name_nbytes = PyUnicode_InternFromString("nbytes");
    name_opts = PyUnicode_InternFromString("opts");
    name_group = PyUnicode_InternFromString("group");
    name_default = PyUnicode_InternFromString("_default_pg");
    any_peer = PyLong_FromLong(ANY_PEER);
    no_peer = PyLong_FromLong(NO_PEER);
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || !name_async || !name_nbytes || !name_opts || !name_group || !name_default
        || !any_peer || !no_peer
        || PyModule_AddType(made, &TallyType) || PyModule_AddType(made, &RingType) || PyModule_AddType(made, &CallType)
        || PyModule_AddIntMacro(made, COLLECTIVE) || PyModule_AddIntMacro(made, POINT) || PyModule_AddIntMacro(made, WAIT)
        || PyModule_AddIntMacro(made, COMPOSITE)) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
