from moescope.cli import main

main()
