"""How the command line refuses."""

from predmoe import cli

def refused(capsys, arguments, said):
    """Exit code 2 and one line on stderr that says it, nothing on stdout."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("predmoe: ") and printed.err.count("\n") == 1, printed
    assert said in printed.err
