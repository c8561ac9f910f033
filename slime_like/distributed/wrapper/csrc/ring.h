/* Records in the memory of slime_like.distributed.forensics.ring. */

enum { INDEX, STARTED, ENDED, BYTES, CODE, SEQUENCE, PEER, WIDTH }; /* words of a record */
enum { NO_PEER = -2, ANY_PEER = -1 };

typedef struct {
    PyObject_HEAD
    Py_buffer buffer;
    int64_t *words; /* of the first record; NULL once closed */
    int64_t slots, index, head;
    Py_buffer request;   /* a word that other ranks write, or none */
    const int64_t *word;
    long long seen;      /* its value at the last check */
    long long composing; /* thread running a composite, or 0 */
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
    if (ring->words == NULL) return index; /* closed by another thread */
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
    if (at[INDEX] == index) at[ENDED] = when; /* else a later record has overwritten it */
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
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "slime_like.distributed.wrapper._hot.Ring",
    .tp_basicsize = sizeof(Ring),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)Ring_dealloc,
    .tp_methods = Ring_methods,
    .tp_members = Ring_members,
    .tp_init = (initproc)Ring_init,
    .tp_new = PyType_GenericNew,
};
