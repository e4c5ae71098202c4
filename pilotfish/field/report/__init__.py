"""`field report`: run files in, one HTML page with its plots out.

`measured` reads a run, checks it by `plausible` and counts what is left out; `figures`, `hindsight`
and `link` compute its figures, by `statistics`; `latency_plots`, `plots`, `timeline` and
`choice_plots` draw them on a `canvas`, and `pictures` lists them; `tables` formats tables, and
`page` joins it all by `template`. `write` is the entry point. What only reads and counts needs no
matplotlib.
"""
