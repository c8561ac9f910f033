/* Writer of the records in the memory of slime_like.distributed.forensics.ring. */

enum { INDEX, STARTED, ENDED, BYTES, CODE, SEQUENCE, PEER, WIDTH }; /* words of a record */
enum { NO_PEER = -2, ANY_PEER = -1 };

typedef struct {
    PyObject_HEAD
    Py_buffer buffer;
    int64_t *words; /* start of the first record; NULL once closed */
    int64_t slots, index, head;
    Py_buffer request;           /* memory of request_word */
    const int64_t *request_word; /* written by other ranks (guard/symmetric_actions.py); NULL: none */
    long long last_request;      /* value of the word at the last check by the guard */
    long long composite_thread;  /* thread in a composite function, or 0 */
} Ring;

static int Ring_init(Ring *self, PyObject *args, PyObject *kw)
{
    PyObject *memory;
    long long head, slots;
    if (self->words != NULL || kw != NULL || !PyArg_ParseTuple(args, "OLL", &memory, &head, &slots)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "call Ring(memory, head, slots) once");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &self->buffer, PyBUF_WRITABLE)) return -1;
    int64_t room = (int64_t)self->buffer.len - head; /* compared without products, which could overflow */
    if (slots < 1 || slots & (slots - 1) || head < 0 || head % 8 || room < 0 || slots > room / (WIDTH * 8)) {
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
    if (self->request_word != NULL) {
        self->request_word = NULL;
        PyBuffer_Release(&self->request);
    }
    Py_RETURN_NONE;
}

static PyObject *Ring_watch(Ring *self, PyObject *memory)
{
    if (self->request_word != NULL || PyObject_GetBuffer(memory, &self->request, PyBUF_WRITABLE)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "this ring already watches a word");
        return NULL;
    }
    if (self->request.len < 8) {
        PyBuffer_Release(&self->request);
        PyErr_SetString(PyExc_ValueError, "the memory is smaller than a word of 8 bytes");
        return NULL;
    }
    self->request_word = self->request.buf;
    Py_RETURN_NONE;
}

static PyObject *Ring_next_record(Ring *self, PyObject *none)
{
    int64_t index = self->index++, first_word = self->head + (index & (self->slots - 1)) * WIDTH;
    return Py_BuildValue("(LLL)", (long long)index, (long long)(first_word * 8), (long long)(first_word + ENDED));
}

static void Ring_dealloc(Ring *self)
{
    Py_XDECREF(Ring_close(self, NULL));
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Write the record of an op and return its index. */
static inline int64_t add_record(Ring *ring, int64_t started, int64_t size, int64_t code, int64_t sequence, int64_t peer)
{
    int64_t index = ring->index++;
    if (ring->words == NULL) return index; /* closed by another thread */
    int64_t *record = ring->words + (index & (ring->slots - 1)) * WIDTH;
    record[INDEX] = index;
    record[STARTED] = started;
    record[ENDED] = 0;
    record[BYTES] = size;
    record[CODE] = code;
    record[SEQUENCE] = sequence;
    record[PEER] = peer;
    return index;
}

/* Record that op ``index`` ended, unless a later op has overwritten its record. */
static inline void record_end(Ring *ring, int64_t index, int64_t time_ns)
{
    if (ring->words == NULL) return;
    int64_t *record = ring->words + (index & (ring->slots - 1)) * WIDTH;
    if (record[INDEX] == index) record[ENDED] = time_ns;
}

static PyMethodDef Ring_methods[] = {
    {"next_record", (PyCFunction)Ring_next_record, METH_NOARGS,
     "Return the index of the next op, the offset of its record in bytes, and the word for its end time."},
    {"watch", (PyCFunction)Ring_watch, METH_O, "Let the guard check ops while the word in this memory differs from ``last_request``."},
    {"close", (PyCFunction)Ring_close, METH_NOARGS, "Release the memory. Later ops take the Python function."},
    {NULL},
};

static PyMemberDef Ring_members[] = {
    {"last_request", T_LONGLONG, offsetof(Ring, last_request)},
    {"composite_thread", T_LONGLONG, offsetof(Ring, composite_thread)},
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
