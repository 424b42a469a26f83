import sys

from predmoe.cli import main

sys.exit(main())
