/* European options by Black, Scholes and Merton. The function on workers and programs that price locally use the same code,
 * so prices are equal bit by bit. */
#ifndef BLACKSCHOLES_H
#define BLACKSCHOLES_H

#include <math.h>
#include <stdint.h>

typedef struct bs_option {
    double spot;
    double strike;
    double rate;       /* continuously compounded, per year */
    double dividend;   /* continuous yield, per year; for currencies the foreign rate; equal to rate for futures */
    double volatility; /* per square root of a year */
    double years;      /* to expiry */
    int64_t put;       /* 0: call, 1: put */
} bs_option;

_Static_assert(sizeof(bs_option) == 56, "options are sent as bytes");

static inline double bs_normal(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }

/* Price of one option; NaN if the option is invalid (spot or strike not above 0, negative volatility or time). */
static inline double bs_price(const bs_option *o) {
    if (!(o->spot > 0 && o->strike > 0 && o->volatility >= 0 && o->years >= 0))
        return NAN;
    double spot = o->spot * exp(-o->dividend * o->years), strike = o->strike * exp(-o->rate * o->years);
    double sign = o->put ? -1 : 1, spread = o->volatility * sqrt(o->years);
    if (spread == 0)
        return fmax(sign * (spot - strike), 0);
    double d1 = log(spot / strike) / spread + 0.5 * spread;
    return sign * (spot * bs_normal(sign * d1) - strike * bs_normal(sign * (d1 - spread)));
}

#endif
