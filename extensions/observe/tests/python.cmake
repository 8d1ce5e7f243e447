# Tests of Python, by the functions of python/tests/CMakeLists.txt, which includes this.
cohort_python_test(track_files test_track_sinks.Files)
cohort_python_test(track_tensorboard test_track_sinks.TensorBoard)
cohort_slow(python.track_tensorboard)  # TensorBoard is 80 MB
cohort_python_test(client_run test_client_run)
cohort_python_test(track_wandb test_track_sinks.Wandb)
cohort_slow(python.track_wandb)  # wandb is 125 MB, and takes seconds to begin
cohort_python_test(watch "test_watch.Figures;test_watch.RunPage;test_watch.InATerminal;test_watch.StatusLine")
cohort_python_test(watch_runs test_watch.Runs)
cohort_python_test(watch_page test_watch.Page)
cohort_python_test(watch_browser test_watch.Browser)
cohort_slow(python.watch_browser)  # that a real browser shows what the page's data say; Chromium is 350 MB
cohort_python_test(trace test_trace.Command)
foreach(test track_files track_tensorboard track_wandb trace watch watch_runs watch_page watch_browser)
  set_property(TEST python.${test} APPEND PROPERTY ENVIRONMENT "COHORT_COMMAND=$<TARGET_FILE:cohort>")
endforeach()
cohort_slow(python.trace)  # track and trace_tests show what a timeline holds
