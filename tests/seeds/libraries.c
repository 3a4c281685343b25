/* FFTW, GSL, libxml2 and SQLite in memory, prepared in setup and used in queries. */
#include <fftw3.h>
#include <gsl/gsl_interp.h>
#include <gsl/gsl_rng.h>
#include <gsl/gsl_spline.h>
#include <libxml/parser.h>
#include <libxml/xpath.h>
#include <math.h>
#include <sqlite3.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static fftw_plan plan;
static fftw_complex *wave;
static gsl_spline *spline;
static gsl_interp_accel *near;
static gsl_rng *rng;
static xmlDocPtr doc;
static sqlite3 *db;
static sqlite3_stmt *ask;
static int calls;

uint32_t setup(void *in, uint32_t size, void *out) {
    (void)in, (void)size, (void)out;
    wave = fftw_alloc_complex(1024);
    plan = fftw_plan_dft_1d(1024, wave, wave, FFTW_FORWARD, FFTW_ESTIMATE);
    double x[100], y[100];
    for (int i = 0; i < 100; i++)
        x[i] = i, y[i] = sin(i * 0.1);
    near = gsl_interp_accel_alloc();
    spline = gsl_spline_alloc(gsl_interp_cspline, 100);
    gsl_spline_init(spline, x, y, 100);
    rng = gsl_rng_alloc(gsl_rng_mt19937);
    gsl_rng_set(rng, 77);
    static const char text[] = "<a><b n='1'>one</b><b n='2'>two</b></a>";
    doc = xmlReadMemory(text, sizeof text - 1, "x.xml", NULL, 0);
    if (sqlite3_open(":memory:", &db) || sqlite3_exec(db, "create table t(k integer primary key, v text);", NULL, NULL, NULL))
        return 1;
    for (int i = 0; i < 100; i++) {
        char line[64];
        snprintf(line, sizeof line, "insert into t values(%d, 'v%d')", i, i * i);
        sqlite3_exec(db, line, NULL, NULL, NULL);
    }
    return (uint32_t)sqlite3_prepare_v2(db, "select v from t where k=?", -1, &ask, NULL);
}

uint32_t query(void *in, uint32_t size, void *out) {
    (void)in, (void)size;
    for (int i = 0; i < 1024; i++)
        wave[i][0] = cos(i * 0.01), wave[i][1] = 0;
    fftw_execute(plan);
    xmlXPathContextPtr c = xmlXPathNewContext(doc);
    xmlXPathObjectPtr o = xmlXPathEvalExpression((const xmlChar *)"/a/b[@n='2']", c);
    xmlChar *content = xmlNodeGetContent(o->nodesetval->nodeTab[0]);
    sqlite3_reset(ask);
    sqlite3_bind_int(ask, 1, 9 + calls);
    sqlite3_step(ask);
    calls++;
    int n = snprintf(out, 4096, "%d %.6f %.6f %lu %s %s", calls, wave[3][0], gsl_spline_eval(spline, 12.3 + calls, near), gsl_rng_get(rng),
                     (const char *)content, (const char *)sqlite3_column_text(ask, 0));
    xmlFree(content);
    xmlXPathFreeObject(o);
    xmlXPathFreeContext(c);
    return (uint32_t)n;
}
