// Command generate writes options.txt, the input of the Black-Scholes example: first options whose prices are
// published in textbooks, then options from a linear congruential generator with a fixed seed, so that the file is always
// the same.
//
//	go run ./examples/mpi/blackscholes/generate >examples/mpi/blackscholes/options.txt
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
)

const header = `# European options for the Black-Scholes example. Written by examples/mpi/blackscholes/generate; do not edit.
#
# spot    price of the underlying
# strike  exercise price
# rate    risk-free rate, continuously compounded, per year
# yield   continuous dividend yield per year (foreign rate for currencies, the rate itself for futures)
# vol     volatility per square root of a year
# years   time to expiry
# type    C call, P put
# price   published price, good to half a unit of its last digit; - where none is published
#
`

// published are options with prices from textbooks. Those of Haug's book were compared with QuantLib's test suite
// (europeanoption.cpp), which quotes them.
const published = `# J. Hull, Options, Futures, and Other Derivatives: stock
42 40 0.10 0 0.20 0.5 C 4.76
42 40 0.10 0 0.20 0.5 P 0.81
# E. G. Haug, The Complete Guide to Option Pricing Formulas: Black-Scholes, Merton, Black 76, Garman-Kohlhagen
60 65 0.08 0 0.30 0.25 C 2.1334
100 95 0.10 0.05 0.20 0.5 P 2.4648
19 19 0.10 0.10 0.28 0.75 C 1.7011
19 19 0.10 0.10 0.28 0.75 P 1.7011
1.56 1.60 0.06 0.08 0.12 0.5 C 0.0291
75 70 0.10 0.05 0.35 0.5 P 4.0870
# the same book, options on futures at rate 0.10: strike 100, volatility 0.15, 0.25, 0.35, a tenth of a year; without
# the one at 100 and 0.15, where it prints 1.8734 and the formula gives 1.87334
90 100 0.10 0.10 0.15 0.1 C 0.0205
110 100 0.10 0.10 0.15 0.1 C 9.9413
90 100 0.10 0.10 0.25 0.1 C 0.3150
100 100 0.10 0.10 0.25 0.1 C 3.1217
110 100 0.10 0.10 0.25 0.1 C 10.3556
90 100 0.10 0.10 0.35 0.1 C 0.9474
100 100 0.10 0.10 0.35 0.1 C 4.3693
110 100 0.10 0.10 0.35 0.1 C 11.1381
# made up
`

const madeUp = 1008 // with the published ones 1024 options

// generator is Knuth's MMIX linear congruential generator.
type generator uint64

// between returns a multiple of 1/steps of the interval from lo to hi.
func (g *generator) between(lo, hi float64, steps int) float64 {
	*g = *g*6364136223846793005 + 1442695040888963407
	return lo + (hi-lo)*float64(int(*g>>33)%(steps+1))/float64(steps)
}

func write(out io.Writer) error {
	w := bufio.NewWriter(out)
	w.WriteString(header)
	w.WriteString(published)
	g := generator(2023)
	for range madeUp {
		spot := g.between(20, 220, 800)
		strike := spot * g.between(0.7, 1.3, 60)
		rate, yield := g.between(0, 0.08, 32), g.between(0, 0.04, 16)
		vol, years := g.between(0.05, 0.65, 60), g.between(0.05, 3.05, 60)
		kind := 'C'
		if g.between(0, 1, 1) == 1 {
			kind = 'P'
		}
		fmt.Fprintf(w, "%.2f %.4f %.4f %.4f %.2f %.2f %c -\n", spot, strike, rate, yield, vol, years, kind)
	}
	return w.Flush()
}

func main() {
	if err := write(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}
