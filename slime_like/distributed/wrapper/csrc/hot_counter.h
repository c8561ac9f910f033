/* State that changes with every op: the clock, sequence numbers, and the hot fields of a counter. */

static inline int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t); /* the clock of time.perf_counter_ns */
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- SequenceCounter: counts its calls from 1, as itertools.count(1).__next__ does ---------------------------------- */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    long long last;
} SequenceCounter;

static PyObject *SequenceCounter_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (PyVectorcall_NARGS(nargsf) || (names != NULL && PyTuple_GET_SIZE(names))) {
        PyErr_SetString(PyExc_TypeError, "a SequenceCounter takes no arguments");
        return NULL;
    }
    return PyLong_FromLongLong(++((SequenceCounter *)self)->last);
}

static PyObject *SequenceCounter_new(PyTypeObject *type, PyObject *args, PyObject *kw)
{
    SequenceCounter *self = (SequenceCounter *)type->tp_alloc(type, 0);
    if (self != NULL) self->vectorcall = SequenceCounter_call;
    return (PyObject *)self;
}

static PyTypeObject SequenceCounterType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "slime_like.distributed.wrapper._hot.SequenceCounter",
    .tp_basicsize = sizeof(SequenceCounter),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(SequenceCounter, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = SequenceCounter_new,
};

/* Return the next number of a SequenceCounter or of a function without arguments; -1 with an error. */
static inline int64_t next_number(PyObject *counter)
{
    if (Py_IS_TYPE(counter, &SequenceCounterType)) return ++((SequenceCounter *)counter)->last;
    PyObject *object = PyObject_CallNoArgs(counter);
    if (object == NULL) return -1;
    int64_t number = PyLong_AsLongLong(object);
    Py_DECREF(object);
    return number;
}

/* ---- HotCounterFields: the fields of slime_like.distributed.guard.counters.Counter that every op reads or changes ------ */
typedef struct {
    PyObject_HEAD
    long long calls, bytes, ns, code;
    double check_at;
    PyObject *target, *next_sequence, *peers;
} HotCounterFields;

static int HotCounterFields_traverse(HotCounterFields *self, visitproc visit, void *arg)
{
    Py_VISIT(self->target);
    Py_VISIT(self->next_sequence);
    Py_VISIT(self->peers);
    return 0;
}

static int HotCounterFields_clear(HotCounterFields *self)
{
    Py_CLEAR(self->target);
    Py_CLEAR(self->next_sequence);
    Py_CLEAR(self->peers);
    return 0;
}

static void HotCounterFields_dealloc(HotCounterFields *self)
{
    PyObject_GC_UnTrack(self);
    HotCounterFields_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef HotCounterFields_members[] = {
    {"calls", T_LONGLONG, offsetof(HotCounterFields, calls)},
    {"bytes", T_LONGLONG, offsetof(HotCounterFields, bytes)},
    {"ns", T_LONGLONG, offsetof(HotCounterFields, ns)},
    {"code", T_LONGLONG, offsetof(HotCounterFields, code)},
    {"check_at", T_DOUBLE, offsetof(HotCounterFields, check_at)},
    {"target", T_OBJECT, offsetof(HotCounterFields, target)},
    {"next_sequence", T_OBJECT, offsetof(HotCounterFields, next_sequence)},
    {"peers", T_OBJECT, offsetof(HotCounterFields, peers)},
    {NULL},
};

static PyTypeObject HotCounterFieldsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "slime_like.distributed.wrapper._hot.HotCounterFields",
    .tp_basicsize = sizeof(HotCounterFields),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)HotCounterFields_traverse,
    .tp_clear = (inquiry)HotCounterFields_clear,
    .tp_dealloc = (destructor)HotCounterFields_dealloc,
    .tp_members = HotCounterFields_members,
    .tp_new = PyType_GenericNew,
};
