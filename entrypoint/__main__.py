from entrypoint.cli import main

main()
