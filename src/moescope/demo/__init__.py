"""demo: the shipped model and its recipe."""

import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """`moescope.demo` is a package and a verb: calling it runs the verb, in any order of imports."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from moescope.demo.verb import demo

        return demo(*args, **options)


sys.modules[__name__].__class__ = CallablePackage
