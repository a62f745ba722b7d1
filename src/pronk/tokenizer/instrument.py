"""Templates rewritten after parsing, so that what is neither a call nor an operator reports to the budget too."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, nodes

from pronk.tokenizer.budget import OverBudget

# Published templates have up to some 6,000; Python's compiler takes half a second for these.
TEMPLATE_NODES = 10_000


def instrument(tree: nodes.Template, environment: Environment) -> nodes.Template:
    """The same template, with such nodes made to go through methods of the environment. Raises OverBudget."""

    def through(name: str, line: int, *arguments: Any) -> nodes.Call:
        method = nodes.EnvironmentAttribute(name)
        call = nodes.Call(method, list(arguments), [], None, None)
        call.set_lineno(line, override=True)
        return call

    def size(node: nodes.Node) -> int:
        return 1 + sum(map(size, node.iter_child_nodes()))

    def rewrite(node: nodes.Node) -> nodes.Node:
        cost = size(node) if isinstance(node, nodes.For) else 0
        for name, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, name, rewrite(value))
            elif isinstance(value, list):
                setattr(node, name, [rewrite(v) if isinstance(v, nodes.Node) else v for v in value])
        line = node.lineno
        if isinstance(node, nodes.For):
            node.iter = through("seen", line, node.iter)
            node.test = node.test and through("seen", line, node.test)
            node.body.insert(0, nodes.ExprStmt(through("spend", line, nodes.Const(cost))).set_lineno(line))
        elif isinstance(node, nodes.Concat):
            return through("joined", line, nodes.List(node.nodes))
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            bounds = (node.arg.start, node.arg.stop, node.arg.step)
            return through("cut", line, node.node, *(b or nodes.Const(None) for b in bounds))
        elif isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return through("made", line, node)
        elif isinstance(node, nodes.Compare):
            node.expr = through("seen", line, node.expr)
        return node

    if size(tree) > TEMPLATE_NODES:
        raise OverBudget(f"has more than {TEMPLATE_NODES} parts")
    rewritten = rewrite(tree)
    assert isinstance(rewritten, nodes.Template)
    rewritten.set_environment(environment)
    return rewritten
