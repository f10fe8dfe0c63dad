"""How long a file of Python is for whoever reads its code."""

import ast
import io
import tokenize

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(text):
    """How many lines have code: not those that are blank, a comment or part of a docstring."""
    told = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for kind, _, start, end, _ in tokens if kind not in _NO_CODE for line in range(start[0], end[0] + 1)}
    return len(lines - told)
