"""`field report`: run files in, one HTML page with its plots out.

`measured` reads a run and counts what is left out, `figures` and `hindsight` make numbers of its
answers by `statistics`, `plots`, `choice_plots` and `timeline` draw them, `tables` puts them into
cells, and `page` joins it all by `template`.
"""
