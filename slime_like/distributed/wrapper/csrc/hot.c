/* The plain case of an op in C: as slime_like.distributed.wrapper.calls, in a quarter of the time.

   An op is plain where its counter is known, the guard is not due, and its arguments are those that torch gives. All
   other calls, and all errors, go to the Python function that each object has beside it; that function alone says what
   an op means, and tests hold both against each other. Everything here runs under the interpreter's lock. One source of
   several files: what is counted (tally.h), records (ring.h), ops that are waited for later (works.h), what all calls do
   (call.h), and here the kinds of calls. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

#include "tally.h"
/* each header uses the previous ones */
#include "ring.h"
#include "works.h"
#include "call.h"

static PyObject *name_async, *name_opts, *name_group, *name_default, *any_peer, *no_peer;

/* Return 1 if the caller waits itself: opts.asyncOp, or if there is no such option. */
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
    result = Py_NewRef(Py_None); /* torch then assumes that the backend has waited */
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
    if (self->payload >= 0 && (size = bytes_of(self, args[1])) < 0) goto done; /* may run Python, which may change peers */
    if ((next = PyDict_GetItemWithError(tally->peers, key)) == NULL) { /* the first with this peer */
        Py_DECREF(tally);
        PyErr_Clear();
        return PyObject_Vectorcall(self->slow, args, nargsf, names);
    }
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
    Issued *at = PyVectorcall_NARGS(nargsf) < 1 ? NULL : known(self->loose, (int64_t)(intptr_t)args[0]);
    if (at == NULL) return PyObject_Vectorcall(self->raw, args, nargsf, names);
    if (!PyWeakref_CheckRefExact(at->ref) || PyWeakref_GetObject(at->ref) != args[0] || !Py_IS_TYPE(at->tally, self->counter))
        return PyObject_Vectorcall(self->slow, args, nargsf, names);
    Issued issued = *at;
    vacate(self->loose, at);
    Tally *tally = (Tally *)issued.tally;
    int64_t started = now();
    PyObject *done = PyObject_Vectorcall(self->raw, args, nargsf, names);
    if (done == NULL) {
        fail(self, issued.tally, issued.index);
    } else {
        int64_t when = now();
        ended(self->ring, issued.index, when);
        tally->ns += when - started;
    }
    Py_DECREF(issued.ref);
    Py_DECREF(issued.tally);
    return done;
}

/* Return the group of a composite, a new reference; NULL without an error if it is not obvious. */
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
    /* only this thread's; another one's may have ended */
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
                            "world", "tensor", "nbytes", "counter", "payload", "anyone", "purge_at", NULL};
    static const vectorcallfunc kinds[] = {call_collective, call_point, call_wait, call_composite};
    PyObject *slow, *raw, *table, *ring, *loose, *wait, *failed, *outstanding, *size, *world, *tensor, *nbytes,
        *counter;
    if (self->slow != NULL) {
        PyErr_SetString(PyExc_TypeError, "a Call is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kw, "iOOO!O!O!OOOOOO!OO!npn", names, &self->kind, &slow, &raw, &PyDict_Type, &table,
                                     &RingType, &ring, &WorksType, &loose, &wait, &failed, &outstanding, &size, &world,
                                     &PyType_Type, &tensor, &nbytes, &PyType_Type, &counter, &self->payload,
                                     &self->anyone, &self->purge_at))
        return -1;
    if (!PyType_IsSubtype((PyTypeObject *)counter, &TallyType)) {
        PyErr_SetString(PyExc_TypeError, "counters are Tallies");
        return -1;
    }
    if (self->kind < COLLECTIVE || self->kind > COMPOSITE) {
        PyErr_SetString(PyExc_ValueError, "no such kind");
        return -1;
    }
    self->vectorcall = kinds[self->kind];
    self->slow = Py_NewRef(slow);
    self->raw = Py_NewRef(raw);
    self->table = Py_NewRef(table);
    self->ring = (Ring *)Py_NewRef(ring);
    self->loose = (Works *)Py_NewRef(loose);
    self->wait = Py_NewRef(wait);
    self->failed = Py_NewRef(failed);
    self->outstanding = Py_NewRef(outstanding);
    self->size = Py_NewRef(size);
    self->world = Py_NewRef(world);
    self->tensor = (PyTypeObject *)Py_NewRef(tensor);
    self->counter = (PyTypeObject *)Py_NewRef(counter);
    self->nbytes = Py_NewRef(nbytes);
    PyGetSetDescrObject *found = (PyGetSetDescrObject *)nbytes;
    if (Py_IS_TYPE(nbytes, &PyGetSetDescr_Type) && PyType_IsSubtype(self->tensor, PyDescr_TYPE(found))
        && found->d_getset->closure == NULL)
        self->read_nbytes = found->d_getset->get;
    return 0;
}

static PyGetSetDef Call_getset[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict}, {NULL}};

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "slime_like.distributed.wrapper._hot.Call",
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
    name_opts = PyUnicode_InternFromString("opts");
    name_group = PyUnicode_InternFromString("group");
    name_default = PyUnicode_InternFromString("_default_pg");
    any_peer = PyLong_FromLong(ANY_PEER);
    no_peer = PyLong_FromLong(NO_PEER);
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || !name_async || !name_opts || !name_group || !name_default || !any_peer || !no_peer
        || PyModule_AddType(made, &TallyType) || PyModule_AddType(made, &NumberType) || PyModule_AddType(made, &RingType)
        || PyModule_AddType(made, &WorksType) || PyModule_AddType(made, &CallType)
        || PyModule_AddIntMacro(made, COLLECTIVE) || PyModule_AddIntMacro(made, POINT) || PyModule_AddIntMacro(made, WAIT)
        || PyModule_AddIntMacro(made, COMPOSITE)) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
