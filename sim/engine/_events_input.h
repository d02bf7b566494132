/* The data of _events.c, and how it is read from Python. */

#ifndef EVENTS_INPUT_H
#define EVENTS_INPUT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <limits.h>

#if FLT_EVAL_METHOD != 0
#error "doubles are computed in wider registers here, so the last bits would not be Python's"
#endif

#define NONE (-1)

typedef struct { int to, next; double lag_s; } Edge; /* `next`: the next edge of the same task */

typedef struct { int link; double load; } Place; /* a link of a path, and the path's bytes/s on it */

typedef struct { int begin, end; double quiet_s; } Path; /* of a kind of flows: its range of places */

typedef struct {
    int task, path;
    Py_ssize_t touched; /* the settling that last visited it */
    double rate;
    double since_s; /* when the rate last changed */
    double left_s;  /* remaining time from then on, at the rate without other flows */
    double due_s;   /* when it ends at this rate; NaN, which equals no time: not running */
    double told_s;  /* the earliest event that checks whether it has ended */
} Flow;

typedef struct { int flow; double load; } User;

#define LIST(type) struct { type *items; int count, room; }

typedef struct {
    LIST(User) users;
    int changed, over;    /* users changed since the last settling; users need more than its bandwidth */
    int index;            /* number among the full links */
    Py_ssize_t found;     /* the settling that last found it full */
    double capacity, limit;
} Link;

typedef struct { int path, flow; } Moved; /* a flow that may go faster or slower now */

typedef struct { double when_s; int what; } Event; /* flow `what` may end, or the bytes of flow ~what begin to flow */

typedef struct {
    int tasks, links, sorts;
    const double *seconds;                      /* by task, as all up to `flow_of`; the first three are Python's */
    double *start_s, *end_s;
    int *missing, *on_end, *on_start, *flow_of; /* number of waits, first edges, flow or NONE */
    int *path_of;                               /* by kind, or NONE */
    Path *paths;
    Link *link;
    LIST(Edge) edges;
    LIST(Place) places;
    LIST(Flow) flows; /* tasks that are flows, in the order of tasks */
    LIST(int) ready;  /* a stack of tasks without waits */
    LIST(Event) heap;
    LIST(int) changed, full; /* links */
    LIST(Moved) moved;
    LIST(double) key; /* argument of calls to Python */
    int over;         /* number of full links */
    Py_ssize_t settling;
    PyObject *fair, *fsum; /* Python functions; borrowed references */
} Run;

/* MAKE allocates `count` zeroed elements, ADD appends one. Both give 0, or -1 without memory. */
#define MAKE(p, count) \
    (((p) = PyMem_Calloc((count) > 0 ? (size_t)(count) : 1, sizeof *(p))) == NULL ? (PyErr_NoMemory(), -1) : 0)
#define ADD(list, ...) \
    ((list).count == (list).room && ((list).items = larger((list).items, &(list).room, sizeof *(list).items)) == NULL \
         ? (PyErr_NoMemory(), -1) \
         : ((list).items[(list).count++] = (__VA_ARGS__), 0))

static void *larger(void *old, int *room, size_t size)
{
    int more = *room < 8 ? 8 : *room > INT_MAX / 2 ? 0 : 2 * *room;
    void *p = more == 0 ? NULL : PyMem_Realloc(old, (size_t)more * size);
    if (p == NULL)
        PyMem_Free(old);
    *room = more;
    return p;
}

static void release(Run *r)
{
    void *all[] = {r->missing, r->on_end, r->on_start, r->flow_of, r->path_of, r->paths, r->edges.items, r->places.items, r->flows.items, r->ready.items,
                   r->heap.items, r->changed.items, r->full.items, r->moved.items, r->key.items};
    for (int i = 0; r->link != NULL && i < r->links; i++)
        PyMem_Free(r->link[i].users.items);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        PyMem_Free(all[i]);
    PyMem_Free(r->link);
}

/* ---- reading ---- */

static int check(int holds, const char *message)
{
    if (!holds)
        PyErr_SetString(PyExc_TypeError, message);
    return holds ? 0 : -1;
}

static int as_double(PyObject *x, double *out)
{
    if (check(PyFloat_Check(x) || PyLong_Check(x), "seconds, loads and capacities are floats"))
        return -1;
    *out = PyFloat_Check(x) ? PyFloat_AS_DOUBLE(x) : PyLong_AsDouble(x);
    return *out == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static int as_int(PyObject *x, Py_ssize_t from, Py_ssize_t below, const char *what, Py_ssize_t *out)
{
    if (check(PyLong_Check(x), "tasks, sorts, links and offsets are ints"))
        return -1;
    *out = PyLong_AsSsize_t(x);
    if (*out == -1 && PyErr_Occurred())
        return -1;
    if (*out < from || *out >= below)
        return PyErr_Format(PyExc_IndexError, "%s is %zd, not from %zd to below %zd", what, *out, from, below), -1;
    return 0;
}

static int read_links(Run *r, PyObject *capacity, double over)
{
    Py_ssize_t at = 0, link;
    PyObject *key, *each;
    if (MAKE(r->link, r->links) || MAKE(r->changed.items, r->links) || MAKE(r->full.items, r->links))
        return -1;
    while (PyDict_Next(capacity, &at, &key, &each)) {
        if (as_int(key, 0, r->links, "a link", &link) || as_double(each, &r->link[link].capacity))
            return -1;
        r->link[link].limit = r->link[link].capacity * over;
    }
    return 0;
}

static int read_paths(Run *r, PyObject *by_sort)
{
    int paths = 0;
    Py_ssize_t at, in_path, sort, link;
    PyObject *key, *flow, *each;
    double load;
    if (MAKE(r->path_of, r->sorts) || MAKE(r->paths, PyDict_GET_SIZE(by_sort)))
        return -1;
    for (at = 0; at < r->sorts; at++)
        r->path_of[at] = NONE;
    for (at = 0; PyDict_Next(by_sort, &at, &key, &flow); paths++) {
        Path *path = &r->paths[paths];
        if (check(PyTuple_Check(flow) && PyTuple_GET_SIZE(flow) == 2 && PyDict_Check(PyTuple_GET_ITEM(flow, 1)),
                  "a flow is quiet seconds and a dictionary") ||
            as_int(key, 0, r->sorts, "a flow's sort", &sort) || as_double(PyTuple_GET_ITEM(flow, 0), &path->quiet_s))
            return -1;
        path->begin = r->places.count;
        for (in_path = 0; PyDict_Next(PyTuple_GET_ITEM(flow, 1), &in_path, &key, &each);)
            if (as_int(key, 0, r->links, "a flow's link", &link) || as_double(each, &load) ||
                ADD(r->places, (Place){(int)link, load}))
                return -1;
        path->end = r->places.count;
        r->path_of[sort] = path->quiet_s >= 0.0 ? paths : NONE;
    }
    return 0;
}

static int within(int64_t x, int below, const char *what)
{
    if (x >= 0 && x < below)
        return 0;
    return PyErr_Format(PyExc_IndexError, "%s is %lld, not from 0 to below %d", what, (long long)x, below), -1;
}

static int read_tasks(Run *r, const int64_t *sort)
{
    int n = r->tasks;
    if (MAKE(r->missing, n) || MAKE(r->on_end, n) || MAKE(r->on_start, n) || MAKE(r->flow_of, n) ||
        MAKE(r->ready.items, n))
        return -1;
    for (int i = 0; i < n; i++) {
        r->start_s[i] = 0.0;
        r->end_s[i] = -1.0;
        r->on_end[i] = r->on_start[i] = r->flow_of[i] = NONE;
        if (within(sort[i], r->sorts, "a task's sort"))
            return -1;
        if (r->path_of[sort[i]] == NONE)
            continue;
        r->flow_of[i] = r->flows.count;
        if (ADD(r->flows, (Flow){i, r->path_of[sort[i]], 0, 1.0, 0.0, 0.0, Py_NAN, Py_NAN}))
            return -1;
    }
    return MAKE(r->moved.items, r->flows.count);
}

/* Add edges from each of `first`, in the lists of `heads`, to each of `second`; `lag_s` NULL: without lags. */
static int read_edges(Run *r, int *heads, const int64_t *first, const int64_t *second, const double *lag_s, int count)
{
    for (int i = 0; i < count; i++) {
        if (within(first[i], r->tasks, "what is waited for") || within(second[i], r->tasks, "what waits"))
            return -1;
        r->edges.items[r->edges.count] = (Edge){(int)second[i], heads[first[i]], lag_s == NULL ? 0.0 : lag_s[i]};
        heads[first[i]] = r->edges.count++;
        r->missing[second[i]]++;
    }
    return 0;
}

#endif
