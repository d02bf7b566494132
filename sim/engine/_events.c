/* The loop of sim/engine/run.py over flat arrays, with the same results as its Python code to the last bit.

   Both add, subtract, multiply, divide and compare the same doubles. Only the order of ready tasks and of a link's
   users may differ, which changes no result: starts are maxima, a link's demand is a sum rounded once, and events have
   a fixed order, (when, which). This file does not share full links max-min fairly: it calls topology.contention, once
   for each pattern of flows that share links.

   Columns are Python's arrays, checked once and then read in place. Reading runs no Python code, so no dictionary
   changes while it is read; `fair` and `fsum` are called after reading. */

#include "_events_input.h"

/* ---- the heap of events, by (when, what) ---- */

static int earlier(Event a, Event b)
{
    return a.when_s != b.when_s ? a.when_s < b.when_s : a.what < b.what;
}

static void sink(Event *heap, int count, Event e)
{
    int i = 0;
    for (int child; (child = 2 * i + 1) < count; i = child) {
        child += child + 1 < count && earlier(heap[child + 1], heap[child]);
        if (!earlier(heap[child], e))
            break;
        heap[i] = heap[child];
    }
    heap[i] = e;
}

static int push(Run *r, double when_s, int what)
{
    Event e = {when_s, what};
    if (ADD(r->heap, e))
        return -1;
    int i = r->heap.count - 1;
    for (; i > 0 && earlier(e, r->heap.items[(i - 1) / 2]); i = (i - 1) / 2)
        r->heap.items[i] = r->heap.items[(i - 1) / 2];
    r->heap.items[i] = e;
    return 0;
}

/* ---- tasks between flows: engine._walker ---- */

/* Lower the count of waits of each task that waits for an end or a start; tasks without waits become ready. */
static void follow(Run *r, int edge, double from_s)
{
    for (; edge != NONE; edge = r->edges.items[edge].next) {
        int to = r->edges.items[edge].to;
        double start_s = from_s + r->edges.items[edge].lag_s;
        if (start_s > r->start_s[to])
            r->start_s[to] = start_s;
        if (--r->missing[to] == 0)
            r->ready.items[r->ready.count++] = to;
    }
}

/* Compute starts and ends up to the next flows, which arrive later. */
static int walk(Run *r)
{
    while (r->ready.count > 0) {
        int task = r->ready.items[--r->ready.count], flow = r->flow_of[task];
        double begin_s = r->start_s[task];
        follow(r, r->on_start[task], begin_s);
        if (flow == NONE) {
            r->end_s[task] = begin_s + r->seconds[task];
            follow(r, r->on_end[task], r->end_s[task]);
        } else if (push(r, begin_s + r->paths[r->flows.items[flow].path].quiet_s, ~flow)) {
            return -1;
        }
    }
    return 0;
}

/* ---- flows under way: sharing.Sharing ---- */

static void changes(Run *r, int link)
{
    if (!r->link[link].changed)
        r->changed.items[r->changed.count++] = link;
    r->link[link].changed = 1;
}

static int arrive(Run *r, int flow, double now_s)
{
    Flow *f = &r->flows.items[flow];
    f->due_s = f->told_s = r->start_s[f->task] + r->seconds[f->task];
    f->since_s = now_s;
    f->left_s = f->due_s - now_s;
    for (int p = r->paths[f->path].begin; p < r->paths[f->path].end; p++) {
        Link *link = &r->link[r->places.items[p].link];
        if (link->users.count > 0)
            changes(r, r->places.items[p].link);
        if (ADD(link->users, (User){flow, r->places.items[p].load}))
            return -1;
    }
    return 0;
}

static void leave(Run *r, int flow)
{
    Path path = r->paths[r->flows.items[flow].path];
    r->flows.items[flow].due_s = Py_NAN;
    for (int p = path.begin; p < path.end; p++) {
        Link *link = &r->link[r->places.items[p].link];
        int i = 0;
        while (link->users.items[i].flow != flow)
            i++;
        link->users.items[i] = link->users.items[--link->users.count];
        if (link->over)
            changes(r, r->places.items[p].link);
    }
}

/* Call a Python function with the doubles of `key` as bytes; NULL: an error. */
static PyObject *ask(Run *r, PyObject *function)
{
    PyObject *key = PyBytes_FromStringAndSize((const char *)r->key.items, r->key.count * (Py_ssize_t)sizeof(double));
    PyObject *answer = key == NULL ? NULL : PyObject_CallOneArg(function, key);
    Py_XDECREF(key);
    return answer;
}

/* Return whether users need more than a link's bandwidth; -1: an error. The error of adding n terms is less than
   n * 2^-52 of the sum of their magnitudes, so they are added exactly only if the limit is nearer than twice that. */
static int overloaded(Run *r, const Link *link)
{
    double sum = 0.0, size = 0.0;
    for (int i = 0; i < link->users.count; i++) {
        sum += link->users.items[i].load;
        size += fabs(link->users.items[i].load);
    }
    if (link->users.count < 2 || fabs(sum - link->limit) > size * link->users.count * 0x1p-51)
        return link->users.count > 1 && sum > link->limit;
    r->key.count = 0;
    for (int i = 0; i < link->users.count; i++)
        if (ADD(r->key, link->users.items[i].load))
            return -1;
    PyObject *exact = ask(r, r->fsum);
    int failed = exact == NULL || as_double(exact, &sum);
    Py_XDECREF(exact);
    return failed ? -1 : sum > link->limit;
}

static int by_first_int(const void *a, const void *b)
{
    int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

/* Write the key of the fractions: the full links' capacities, and each flow's loads on them, ended by NONE. Links are
   numbered among the full ones and flows ordered by path, so that equal situations on other ranks have the same key. */
static int make_key(Run *r)
{
    qsort(r->full.items, (size_t)r->full.count, sizeof *r->full.items, by_first_int);
    qsort(r->moved.items, (size_t)r->moved.count, sizeof *r->moved.items, by_first_int);
    r->key.count = 0;
    if (ADD(r->key, r->full.count))
        return -1;
    for (int i = 0; i < r->full.count; i++) {
        r->link[r->full.items[i]].index = i;
        if (ADD(r->key, r->link[r->full.items[i]].capacity))
            return -1;
    }
    for (int i = 0; i < r->moved.count; i++) {
        const Path *path = &r->paths[r->moved.items[i].path];
        for (int p = path->begin; p < path->end; p++) {
            const Link *link = &r->link[r->places.items[p].link];
            if (link->found == r->settling && (ADD(r->key, link->index) || ADD(r->key, r->places.items[p].load)))
                return -1;
        }
        if (ADD(r->key, NONE))
            return -1;
    }
    return 0;
}

static void touch_users(Run *r, const Link *link)
{
    for (int i = 0; i < link->users.count; i++) {
        int flow = link->users.items[i].flow;
        if (r->flows.items[flow].touched != r->settling)
            r->moved.items[r->moved.count++] = (Moved){r->flows.items[flow].path, flow};
        r->flows.items[flow].touched = r->settling;
    }
}

static void fill(Run *r, int link)
{
    r->link[link].found = r->settling;
    r->full.items[r->full.count++] = link;
    touch_users(r, &r->link[link]);
}

/* Find `full`, the full links that changed and those that share flows with them, directly or through others, and
   `moved`, their flows and those of links that are no longer full. */
static int find_moved(Run *r)
{
    r->settling++;
    r->full.count = r->moved.count = 0;
    for (int i = 0; i < r->changed.count; i++) {
        Link *link = &r->link[r->changed.items[i]];
        int was = link->over;
        if ((link->over = overloaded(r, link)) < 0)
            return -1;
        link->changed = 0;
        r->over += link->over - was;
        if (link->over)
            fill(r, r->changed.items[i]);
        else if (was)
            touch_users(r, link);
    }
    r->changed.count = 0;
    for (int i = 0; r->over && i < r->moved.count; i++) { /* grows while it is walked */
        const Path *path = &r->paths[r->moved.items[i].path];
        for (int p = path->begin; p < path->end; p++) {
            const Link *link = &r->link[r->places.items[p].link];
            if (link->over && link->found != r->settling)
                fill(r, r->places.items[p].link);
        }
    }
    return 0;
}

/* Change a flow's rate; if it then ends earlier, add an event. */
static int pace(Run *r, int flow, double rate, double now_s)
{
    Flow *f = &r->flows.items[flow];
    if (rate == f->rate)
        return 0;
    if (rate == 0.0)
        return PyErr_SetString(PyExc_ZeroDivisionError, "float division by zero"), -1;
    double left_s = f->left_s - (now_s - f->since_s) * f->rate;
    f->left_s = left_s < 0.0 ? 0.0 : left_s;
    f->rate = rate;
    f->since_s = now_s;
    f->due_s = now_s + f->left_s / rate;
    if (!(f->due_s < f->told_s))
        return 0;
    f->told_s = f->due_s;
    return push(r, f->due_s, flow);
}

/* Compute new rates after all arrivals and departures of an instant. */
static int settle(Run *r, double now_s)
{
    PyObject *fair = NULL;
    int failed = find_moved(r);
    if (!failed && r->full.count)
        failed = make_key(r) || (fair = ask(r, r->fair)) == NULL ||
                 check(PyBytes_Check(fair) && PyBytes_GET_SIZE(fair) == r->moved.count * (Py_ssize_t)sizeof(double),
                       "a fraction of each flow is needed, as bytes");
    for (int i = 0; i < r->moved.count && !failed; i++) {
        double rate = 1.0;
        if (fair != NULL)
            memcpy(&rate, PyBytes_AS_STRING(fair) + i * sizeof rate, sizeof rate);
        failed = pace(r, r->moved.items[i].flow, rate, now_s);
    }
    Py_XDECREF(fair);
    return failed ? -1 : 0;
}

/* ---- the loop: engine._run_events ---- */

static int run_events(Run *r, Py_ssize_t *events)
{
    double now_s = 0.0;
    for (; r->heap.count > 0; ++*events) {
        if (r->heap.items[0].when_s != now_s) {
            if (r->changed.count && settle(r, now_s))
                return -1;
            now_s = r->heap.items[0].when_s;
        }
        int what = r->heap.items[0].what, flow = what < 0 ? ~what : what;
        Flow *f = &r->flows.items[flow];
        if (what < 0) {
            if (arrive(r, flow, now_s))
                return -1;
            sink(r->heap.items, r->heap.count, (Event){f->due_s, flow});
        } else if (now_s < f->due_s) { /* the flow has become slower since, so its end is checked later */
            f->told_s = f->due_s;
            sink(r->heap.items, r->heap.count, (Event){f->due_s, flow});
        } else {
            r->heap.count--;
            sink(r->heap.items, r->heap.count, r->heap.items[r->heap.count]);
            if (now_s == f->due_s) {
                leave(r, flow);
                r->end_s[f->task] = now_s;
                follow(r, r->on_end[f->task], now_s);
                if (walk(r))
                    return -1;
            }
        }
        if ((*events & 0xffff) == 0xffff && PyErr_CheckSignals())
            return -1;
    }
    return 0;
}

enum { SECONDS, SORT, FIRST, SECOND, LAUNCHER, LAUNCHED, LAG_S, START_S, END_S, COLUMNS };

/* Check that all columns have 8 bytes per element, and that columns of the same rows have equal lengths. */
static int check_columns(const Py_buffer *columns, Py_ssize_t sorts, Py_ssize_t links)
{
    for (int i = 0; i < COLUMNS; i++)
        if (columns[i].len % 8 != 0 || columns[i].len / 8 >= INT_MAX / 2)
            return PyErr_SetString(PyExc_ValueError, "columns have 8 bytes a row, and less than 2^30 rows"), -1;
    if (columns[SORT].len != columns[SECONDS].len || columns[START_S].len != columns[SECONDS].len ||
        columns[END_S].len != columns[SECONDS].len || columns[SECOND].len != columns[FIRST].len ||
        columns[LAUNCHED].len != columns[LAUNCHER].len || columns[LAG_S].len != columns[LAUNCHER].len || sorts < 0 ||
        sorts >= INT_MAX || links >= INT_MAX)
        return PyErr_SetString(PyExc_ValueError, "columns of one length are needed, none of 2^31"), -1;
    return 0;
}

static int read_all(Run *r, const Py_buffer *columns, PyObject *by_sort, PyObject *capacity, double over)
{
    int waits = (int)(columns[FIRST].len / 8), launches = (int)(columns[LAUNCHER].len / 8);
    r->tasks = (int)(columns[SECONDS].len / 8);
    r->seconds = columns[SECONDS].buf, r->start_s = columns[START_S].buf, r->end_s = columns[END_S].buf;
    if (read_links(r, capacity, over) || read_paths(r, by_sort) || read_tasks(r, columns[SORT].buf) ||
        MAKE(r->edges.items, waits + launches))
        return -1;
    return read_edges(r, r->on_end, columns[FIRST].buf, columns[SECOND].buf, NULL, waits) ||
           read_edges(r, r->on_start, columns[LAUNCHER].buf, columns[LAUNCHED].buf, columns[LAG_S].buf, launches);
}

static PyObject *run(PyObject *module, PyObject *args)
{
    PyObject *by_sort, *capacity, *answer = NULL;
    Py_buffer c[COLUMNS];
    Py_ssize_t sorts, events = 0;
    double over;
    Run r = {0};
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*y*w*w*nO!O!dOO", &c[SECONDS], &c[SORT], &c[FIRST], &c[SECOND], &c[LAUNCHER],
                          &c[LAUNCHED], &c[LAG_S], &c[START_S], &c[END_S], &sorts, &PyDict_Type, &by_sort,
                          &PyDict_Type, &capacity, &over, &r.fair, &r.fsum))
        return NULL;
    if (!check_columns(c, sorts, PyDict_GET_SIZE(capacity))) {
        r.sorts = (int)sorts, r.links = (int)PyDict_GET_SIZE(capacity);
        if (!read_all(&r, c, by_sort, capacity, over)) {
            for (int i = 0; i < r.tasks; i++)
                if (r.missing[i] == 0)
                    r.ready.items[r.ready.count++] = i;
            if (!walk(&r) && !run_events(&r, &events))
                answer = PyLong_FromSsize_t(events);
        }
    }
    for (int i = 0; i < COLUMNS; i++)
        PyBuffer_Release(&c[i]);
    release(&r);
    return answer;
}

static PyMethodDef methods[] = {
    {"run_columns", run, METH_VARARGS,
     "run_columns(seconds, sort, waited for, waiting, launcher, launched, lag, start, end, sorts, flows by sort, capacity by\n"
     "link, over, fair, fsum)\n\n"
     "Fills in starts and ends (-1: never) and gives the number of events; columns are of doubles and 64-bit integers;\n"
     "a link asked for `over` times its capacity is full."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_events", "The event loop of sim.engine.run, compiled.", 0, methods, NULL, NULL, NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__events(void) { return PyModule_Create(&definition); }
