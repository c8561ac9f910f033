/* The hot path of slime_like.distributed.wrapper.op_wrappers in C, which takes a quarter of the time of the Python code.

   It handles plain calls: the counter exists, the guard need not check, and the arguments are those that torch passes.
   All other calls and all errors go to the equivalent function in Python (``fallback``), which defines the behaviour; a
   test compares both. Everything here runs under the interpreter's lock.

   This file has the four kinds of calls. It includes counters (hot_counter.h), the ring's records (ring.h), asynchronous ops
   (works.h), and the code that all kinds of calls share (call.h). */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

#include "hot_counter.h"
/* each header uses those above it */
#include "ring.h"
#include "works.h"
#include "call.h"

static PyObject *name_async, *name_opts, *name_group, *name_default, *any_peer, *no_peer;

/* Return 1 if torch leaves the wait to the caller (opts.asyncOp, or no such option), else 0; -1 with an error. */
static int is_asynchronous(PyObject *opts)
{
    PyObject *flag = PyObject_GetAttr(opts, name_async);
    if (flag == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 1;
    }
    int value = flag == Py_True ? 1 : flag == Py_False ? 0 : PyObject_IsTrue(flag);
    Py_DECREF(flag);
    return value;
}

static PyObject *call_collective(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Call *self = (Call *)callable;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf), num_named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    Py_ssize_t num_args = n + num_named;
    int64_t started = now(), size = 0;
    HotCounterFields *counter;
    if (num_args < 2 || num_args > 4 || num_named > 1
        || (num_named && PyUnicode_Compare(PyTuple_GET_ITEM(names, 0), name_opts))
        || 1 + self->payload >= num_args || (counter = plain_counter(self, args[0], started)) == NULL)
        return PyObject_Vectorcall(self->fallback, args, nargsf, names);
    PyObject *opts = args[num_args - 1], *work = NULL, *result = NULL;
    if (self->payload >= 0 && (size = bytes_of(self, args[1 + self->payload])) < 0) goto done;
    int64_t sequence = next_number(counter->next_sequence);
    if (sequence < 0) goto done;
    counter->calls++;
    counter->bytes += size;
    int64_t index = add_record(self->ring, started, size, counter->code, sequence, NO_PEER);
    PyObject *target = Py_NewRef(counter->target);
    work = issue(self, target, args, num_args, n, names);
    Py_DECREF(target);
    if (work == NULL) {
        fail(self, (PyObject *)counter, index);
        goto done;
    }
    if (work != Py_None) {
        int async_op = is_asynchronous(opts);
        if (async_op > 0) {
            result = add_work(self, work, counter, index, started);
            goto done;
        }
        PyObject *waited = async_op < 0 ? NULL : PyObject_CallOneArg(self->wait, work);
        if (waited == NULL) {
            fail(self, (PyObject *)counter, index);
            Py_DECREF(work);
            goto done;
        }
        Py_DECREF(waited);
    }
    Py_DECREF(work);
    int64_t end = now();
    record_end(self->ring, index, end);
    counter->ns += end - started;
    result = Py_NewRef(Py_None); /* tells torch that the op has ended */
done:
    Py_DECREF(counter);
    return result;
}

static PyObject *call_point(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Call *self = (Call *)callable;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    int64_t started = now(), size = 0, peer = NO_PEER;
    PyObject *key = self->payload < 0 ? no_peer : self->any_source ? any_peer : n > 2 ? args[2] : NULL;
    PyObject *sequence_counter, *result = NULL;
    HotCounterFields *counter;
    if (names != NULL || n < 2 || n > 4 || key == NULL || !PyLong_CheckExact(key)
        || (counter = plain_counter(self, args[0], started)) == NULL)
        return PyObject_Vectorcall(self->fallback, args, nargsf, names);
    /* bytes_of runs before the look-up of the peer, because it may run Python code that changes ``peers``. */
    if (self->payload >= 0 && (size = bytes_of(self, args[1])) < 0) goto done;
    if ((sequence_counter = PyDict_GetItemWithError(counter->peers, key)) == NULL) { /* first op with this peer */
        Py_DECREF(counter);
        PyErr_Clear();
        return PyObject_Vectorcall(self->fallback, args, nargsf, names);
    }
    peer = PyLong_AsLongLong(key);
    int64_t sequence = next_number(sequence_counter);
    if (sequence < 0 || (peer == -1 && PyErr_Occurred())) goto done;
    counter->calls++;
    counter->bytes += size;
    int64_t index = add_record(self->ring, started, size, counter->code, sequence, peer);
    PyObject *target = Py_NewRef(counter->target), *work = issue(self, target, args, n, n, NULL);
    Py_DECREF(target);
    if (work == NULL) {
        fail(self, (PyObject *)counter, index);
    } else if (work == Py_None) {
        int64_t end = now();
        record_end(self->ring, index, end);
        counter->ns += end - started;
        result = work;
    } else {
        result = add_work(self, work, counter, index, started);
    }
done:
    Py_DECREF(counter);
    return result;
}

static PyObject *call_wait(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Call *self = (Call *)callable;
    PendingWork *slot = PyVectorcall_NARGS(nargsf) < 1 ? NULL : find(self->works, (int64_t)(intptr_t)args[0]);
    if (slot == NULL) return PyObject_Vectorcall(self->raw, args, nargsf, names);
    if (!PyWeakref_CheckRefExact(slot->ref) || PyWeakref_GetObject(slot->ref) != args[0]
        || !Py_IS_TYPE(slot->counter, self->counter_class))
        return PyObject_Vectorcall(self->fallback, args, nargsf, names);
    PendingWork pending = *slot;
    free_slot(self->works, slot);
    HotCounterFields *counter = (HotCounterFields *)pending.counter;
    int64_t started = now();
    PyObject *result = PyObject_Vectorcall(self->raw, args, nargsf, names);
    if (result == NULL) {
        fail(self, pending.counter, pending.index);
    } else {
        int64_t end = now();
        record_end(self->ring, pending.index, end);
        counter->ns += end - started;
    }
    Py_DECREF(pending.ref);
    Py_DECREF(pending.counter);
    return result;
}

/* Return the group of a composite as a new reference; NULL, without an error, if it is not in the usual place. */
static PyObject *group_of(Call *self, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    PyObject *group = NULL;
    if (self->payload < 0) { /* a batch, whose ops all have one group */
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
    HotCounterFields *counter = group == NULL ? NULL : plain_counter(self, group, started);
    Py_XDECREF(group);
    if (counter == NULL) return PyObject_Vectorcall(self->fallback, args, nargsf, names);
    long long outer = self->ring->composite_thread;
    self->ring->composite_thread = (long long)PyThread_get_thread_ident();
    counter->calls++;
    int64_t index = add_record(self->ring, started, 0, counter->code, counter->calls, NO_PEER);
    PyObject *result = PyObject_Vectorcall(self->raw, args, nargsf, names);
    if (result == NULL) fail(self, (PyObject *)counter, index);
    /* another thread may have left its composite since */
    self->ring->composite_thread = outer == (long long)PyThread_get_thread_ident() ? outer : 0;
    int64_t end = now();
    if (result != NULL) record_end(self->ring, index, end);
    counter->ns += end - started;
    Py_DECREF(counter);
    return result;
}

static int Call_init(Call *self, PyObject *args, PyObject *kw)
{
    static char *names[] = {"kind", "fallback", "raw", "counters", "ring", "works", "wait", "record_failure", "add_pending",
                            "size_of", "world", "tensor", "nbytes", "counter_class", "payload", "any_source", "max_pending",
                            NULL};
    static const vectorcallfunc kinds[] = {call_collective, call_point, call_wait, call_composite};
    PyObject *fallback, *raw, *counters, *ring, *works, *wait, *record_failure, *add_pending, *size_of, *world, *tensor,
        *nbytes, *counter_class;
    if (self->fallback != NULL) {
        PyErr_SetString(PyExc_TypeError, "a Call is initialised once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kw, "iOOO!O!O!OOOOOO!OO!npn", names, &self->kind, &fallback, &raw, &PyDict_Type,
                                     &counters, &RingType, &ring, &WorksType, &works, &wait, &record_failure, &add_pending,
                                     &size_of, &world, &PyType_Type, &tensor, &nbytes, &PyType_Type, &counter_class, &self->payload,
                                     &self->any_source, &self->max_pending))
        return -1;
    if (!PyType_IsSubtype((PyTypeObject *)counter_class, &HotCounterFieldsType)) {
        PyErr_SetString(PyExc_TypeError, "counter_class must be a subtype of HotCounterFields");
        return -1;
    }
    if (self->kind < COLLECTIVE || self->kind > COMPOSITE) {
        PyErr_SetString(PyExc_ValueError, "kind must be COLLECTIVE, POINT, WAIT or COMPOSITE");
        return -1;
    }
    self->vectorcall = kinds[self->kind];
    self->fallback = Py_NewRef(fallback);
    self->raw = Py_NewRef(raw);
    self->counters = Py_NewRef(counters);
    self->ring = (Ring *)Py_NewRef(ring);
    self->works = (Works *)Py_NewRef(works);
    self->wait = Py_NewRef(wait);
    self->record_failure = Py_NewRef(record_failure);
    self->add_pending = Py_NewRef(add_pending);
    self->size_of = Py_NewRef(size_of);
    self->world = Py_NewRef(world);
    self->tensor = (PyTypeObject *)Py_NewRef(tensor);
    self->counter_class = (PyTypeObject *)Py_NewRef(counter_class);
    self->nbytes = Py_NewRef(nbytes);
    PyGetSetDescrObject *descriptor = (PyGetSetDescrObject *)nbytes;
    if (Py_IS_TYPE(nbytes, &PyGetSetDescr_Type) && PyType_IsSubtype(self->tensor, PyDescr_TYPE(descriptor))
        && descriptor->d_getset->closure == NULL)
        self->read_nbytes = descriptor->d_getset->get;
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
    PyObject *extension = PyModule_Create(&module);
    if (extension == NULL || !name_async || !name_opts || !name_group || !name_default || !any_peer || !no_peer
        || PyModule_AddType(extension, &HotCounterFieldsType) || PyModule_AddType(extension, &SequenceCounterType)
        || PyModule_AddType(extension, &RingType) || PyModule_AddType(extension, &WorksType)
        || PyModule_AddType(extension, &CallType) || PyModule_AddIntMacro(extension, COLLECTIVE)
        || PyModule_AddIntMacro(extension, POINT) || PyModule_AddIntMacro(extension, WAIT)
        || PyModule_AddIntMacro(extension, COMPOSITE)) {
        Py_XDECREF(extension);
        return NULL;
    }
    return extension;
}
