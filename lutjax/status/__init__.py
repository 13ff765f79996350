"""Matrix of what runs where: every op, direction, implementation and dtype, by what was checked and not by what is registered.

`lutjax status` shows it. Modules: `matrix` has the cells and decides what each says, `checks` runs, lowers and compiles one,
`results` keeps what was checked on other machines, `report` writes text, JSON and Markdown.
"""
