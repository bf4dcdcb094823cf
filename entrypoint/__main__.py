from trainbox_start import main

main()
