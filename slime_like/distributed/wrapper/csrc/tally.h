/* State that changes with every op: the clock, numbers of ops, and the hot part of a counter. */

static inline int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t); /* as time.perf_counter_ns */
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- Number: counts its calls from 1, as itertools.count(1).__next__ does ------------------------------------------- */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    long long last;
} Number;

static PyObject *Number_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (PyVectorcall_NARGS(nargsf) || (names != NULL && PyTuple_GET_SIZE(names))) {
        PyErr_SetString(PyExc_TypeError, "a Number takes no arguments");
        return NULL;
    }
    return PyLong_FromLongLong(++((Number *)self)->last);
}

static PyObject *Number_new(PyTypeObject *type, PyObject *args, PyObject *kw)
{
    Number *self = (Number *)type->tp_alloc(type, 0);
    if (self != NULL) self->vectorcall = Number_call;
    return (PyObject *)self;
}

static PyTypeObject NumberType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "slime_like.distributed.wrapper._hot.Number",
    .tp_basicsize = sizeof(Number),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Number, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = Number_new,
};

/* Call a function without arguments that returns a count; -1 with an error. */
static inline int64_t count(PyObject *next)
{
    if (Py_IS_TYPE(next, &NumberType)) return ++((Number *)next)->last;
    PyObject *number = PyObject_CallNoArgs(next);
    if (number == NULL) return -1;
    int64_t found = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return found;
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
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "slime_like.distributed.wrapper._hot.Tally",
    .tp_basicsize = sizeof(Tally),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)Tally_traverse,
    .tp_clear = (inquiry)Tally_clear,
    .tp_dealloc = (destructor)Tally_dealloc,
    .tp_members = Tally_members,
    .tp_new = PyType_GenericNew,
};
