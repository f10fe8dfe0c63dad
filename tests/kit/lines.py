"""How long a file of Python is for whoever reads its code."""

import ast
import io
import tokenize

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(text):
    """How many lines have code: not those that are blank, a comment or part of a docstring, an attribute's included."""
    told = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for kind, _, start, end, _ in tokens if kind not in _NO_CODE for line in range(start[0], end[0] + 1)}
    return len(lines - told)
