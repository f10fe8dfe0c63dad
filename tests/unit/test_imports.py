from support import run_script

FRAMEWORKS = ("lightning", "pytorch_lightning", "accelerate", "deepspeed", "transformers")


def test_the_package_imports_no_framework():
    """A program that uses plain torch never pays for, or breaks on, a framework it does not use."""
    code = f"""
        import sys, pkgutil, importlib
        import safe_ckpt
        assert "torch" not in sys.modules, "importing the package alone must stay cheap"
        for name in safe_ckpt.__all__:
            getattr(safe_ckpt, name)
        import safe_ckpt.core
        for module in pkgutil.walk_packages(safe_ckpt.core.__path__, "safe_ckpt.core."):
            importlib.import_module(module.name)
        print([name for name in {FRAMEWORKS!r} if name in sys.modules])
    """
    done = run_script(code, fresh=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_writer_process_imports_no_torch():
    """The child that writes stays small: it imports neither torch nor numpy."""
    code = """
        import sys
        import safe_ckpt.core.writer.process
        print([name for name in ("torch", "numpy", "yaml", "safetensors") if name in sys.modules])
    """
    done = run_script(code, fresh=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_unknown_names_are_attribute_errors():
    """A typo in an import fails as it does everywhere."""
    done = run_script("import safe_ckpt; safe_ckpt.Chekpointer", fresh=True)
    assert "AttributeError" in done.stderr
