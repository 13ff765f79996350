"""Matrix of what runs where: every op, direction, implementation and dtype, by what was checked and not by what is registered.

`lutjax status` shows it. Modules: `_matrix` has the cells and decides what each says, `_checks` runs, lowers and compiles one,
`_records` keeps what was checked on other machines, `_report` writes text, JSON and Markdown.
"""
