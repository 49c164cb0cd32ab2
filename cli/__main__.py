"""`python -m scalerl.cli`: the same as `scalerl`, where the script isn't on the path."""

from scalerl.cli.main import main

main()
