! The same network in Fortran, on the same digits.
program digits
  use cohort
  implicit none
  integer, parameter :: pixels = 64, hidden = 32, classes = 10, batch = 120, epochs = 30
  real(c_float), target :: w1(pixels + 1, hidden), w2(hidden + 1, classes)  ! the last row is the bias
  real(c_float), target :: g1(pixels + 1, hidden), g2(hidden + 1, classes)
  real(c_float) :: x(pixels + 1, batch), h(hidden + 1, batch), p(classes, batch), back(hidden)
  integer(1), allocatable :: images(:), labels(:), test_images(:), test_labels(:)
  character(len=4096) :: folder
  type(c_ptr) :: world, gradients
  integer :: rank, ranks, step, first, mine, n, item, count, tests, i
  integer(c_int64_t) :: right(1)

  folder = 'data/digits'
  if (command_argument_count() > 0) call get_command_argument(1, folder)
  call read_idx('train-images-idx3-ubyte', 16, images)
  call read_idx('train-labels-idx1-ubyte', 8, labels)
  call read_idx('t10k-images-idx3-ubyte', 16, test_images)
  call read_idx('t10k-labels-idx1-ubyte', 8, test_labels)
  count = size(labels)
  tests = size(test_labels)
  call random_seed(size=n)
  call random_seed(put=[(i, i=1, n)])
  call random_number(w1)
  call random_number(w2)
  w1 = (w1 - 0.5) / 4
  w2 = (w2 - 0.5) / 2
  w1(pixels + 1, :) = 0
  w2(hidden + 1, :) = 0

  call check(cohort_init(world))  ! of what `cohort run`, mpirun or srun has started, else of this process alone
  rank = cohort_rank(world)
  ranks = cohort_size(world)
  call check(cohort_gradients_create(world, c_null_ptr, gradients))
  call check(cohort_gradients_add(gradients, 'w1', w1, g1, size(w1, kind=c_int64_t), cohort_float32))  ! number 0
  call check(cohort_gradients_add(gradients, 'w2', w2, g2, size(w2, kind=c_int64_t), cohort_float32))  ! number 1

  do step = 0, epochs * count / batch - 1
    first = batch * rank / ranks
    mine = batch * (rank + 1) / ranks - first  ! this rank's part of the batch
    call check(cohort_gradients_begin(gradients, int(mine, c_int64_t)))
    g2 = 0
    do n = 1, mine
      item = mod(step * batch + first + n - 1, count)
      call forward(images(item * pixels + 1:(item + 1) * pixels), x(:, n), h(:, n), p(:, n))
      p(labels(item + 1) + 1, n) = p(labels(item + 1) + 1, n) - 1
      g2 = g2 + spread(h(:, n), 2, classes) * spread(p(:, n), 1, hidden + 1) / mine
    end do
    call check(cohort_gradients_ready(gradients, 1))  ! reduced while the rest is computed
    g1 = 0
    do n = 1, mine
      back = matmul(w2(1:hidden, :), p(:, n)) * (1 - h(1:hidden, n)**2) / mine
      g1 = g1 + spread(x(:, n), 2, hidden) * spread(back, 1, pixels + 1)
    end do
    call check(cohort_gradients_ready(gradients, 0))
    call check(cohort_gradients_wait(gradients))  ! g1 and g2 are averages over the whole batch now
    w1 = w1 - 0.5 * g1
    w2 = w2 - 0.5 * g2
  end do

  right = 0  ! each rank tests its part
  do item = tests * rank / ranks, tests * (rank + 1) / ranks - 1
    call forward(test_images(item * pixels + 1:(item + 1) * pixels), x(:, 1), h(:, 1), p(:, 1))
    if (maxloc(p(:, 1), 1) == test_labels(item + 1) + 1) right = right + 1
  end do
  call check(cohort_all_reduce(world, right, right, 1_c_int64_t, cohort_int64, cohort_sum))
  if (rank == 0) print '(a, f4.2, a, i0, a, i0, a)', 'accuracy ', real(right(1)) / tests, ' on ', tests, ' digits, ', &
                       ranks, ' ranks'
  call check(cohort_gradients_free(gradients))
  call check(cohort_finalize(world))

contains

  subroutine check(status)
    integer(c_int32_t), intent(in) :: status
    if (status == cohort_ok) return
    print '(a)', cohort_last_error()
    error stop 1
  end subroutine

  ! The bytes of an IDX file behind its head.
  subroutine read_idx(name, head, values)
    character(len=*), intent(in) :: name
    integer, intent(in) :: head
    integer(1), allocatable, intent(out) :: values(:)
    integer :: unit, bytes
    open(newunit=unit, file=trim(folder) // '/' // name, access='stream', status='old', action='read')
    inquire(unit, size=bytes)
    allocate(values(bytes - head))
    read(unit, pos=head + 1) values
    close(unit)
  end subroutine

  ! The probabilities of an image's classes.
  subroutine forward(image, input, inner, output)
    integer(1), intent(in) :: image(pixels)
    real(c_float), intent(out) :: input(pixels + 1), inner(hidden + 1), output(classes)
    input(1:pixels) = real(iand(int(image), 255)) / 255
    input(pixels + 1) = 1
    inner(1:hidden) = tanh(matmul(input, w1))
    inner(hidden + 1) = 1
    output = exp(matmul(inner, w2))
    output = output / sum(output)
  end subroutine
end program
