"""Problems from datasets.

loading.py       files, directories and hub datasets -> rows; the only module that imports the library `datasets`
reading.py       row -> Problem
expressions.py   the expression of `where`
selection.py     filters and the held-out split -> row numbers, written once beside the cached rows
task.py          row numbers -> the problem of an index
"""
