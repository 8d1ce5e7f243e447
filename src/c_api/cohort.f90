! Cohort for Fortran: interfaces of those functions of <cohort/c_api.h>, which documents them, that wait, and of gradients,
! under the same names. Arrays that are given to cohort_gradients_add have the attribute target.
! Compile it with the program: gfortran $(cohort --prefix)/share/cohort/cohort.f90 program.f90 $(cohort --cflags)
module cohort
  use, intrinsic :: iso_c_binding
  implicit none

  enum, bind(c)
    enumerator :: cohort_ok = 0, cohort_invalid_argument, cohort_unavailable, cohort_timeout, cohort_peer_lost, &
                  cohort_mismatch, cohort_aborted, cohort_io, cohort_corrupt, cohort_non_finite, cohort_internal
  end enum
  enum, bind(c)
    enumerator :: cohort_float32 = 0, cohort_float64, cohort_float16, cohort_bfloat16, cohort_int8, cohort_int16, &
                  cohort_int32, cohort_int64, cohort_uint8, cohort_uint16, cohort_uint32, cohort_uint64, cohort_bool, &
                  cohort_complex64, cohort_complex128
  end enum
  enum, bind(c)
    enumerator :: cohort_sum = 0, cohort_average, cohort_min, cohort_max, cohort_product, cohort_bit_and, &
                  cohort_bit_or, cohort_bit_xor
  end enum

  type, bind(c) :: cohort_init_options
    integer(c_size_t) :: struct_bytes = 0  ! set by cohort_init_with
    type(c_ptr) :: init_method = c_null_ptr, group_name = c_null_ptr, secret_file = c_null_ptr
    integer(c_int32_t) :: rank = -1, world_size = -1
    integer(c_int64_t) :: init_timeout_ms = -1, timeout_ms = -1
    type(c_funptr) :: share = c_null_funptr
    type(c_ptr) :: share_context = c_null_ptr
    integer(c_int32_t) :: trust_network = 0, alone = 0
  end type

  interface
    integer(c_int32_t) function cohort_init_c(options, comm) bind(c, name="cohort_init")
      import
      type(c_ptr), value :: options
      type(c_ptr), intent(out) :: comm
    end function
    integer(c_int32_t) function cohort_finalize(comm) bind(c)
      import
      type(c_ptr), value :: comm
    end function
    integer(c_int32_t) function cohort_rank(comm) bind(c)
      import
      type(c_ptr), value :: comm
    end function
    integer(c_int32_t) function cohort_size(comm) bind(c)
      import
      type(c_ptr), value :: comm
    end function
    integer(c_int32_t) function cohort_local_rank(comm) bind(c)
      import
      type(c_ptr), value :: comm
    end function
    integer(c_int32_t) function cohort_local_size(comm) bind(c)
      import
      type(c_ptr), value :: comm
    end function
    integer(c_int32_t) function cohort_split(comm, color, key, part) bind(c)
      import
      type(c_ptr), value :: comm
      integer(c_int32_t), value :: color, key
      type(c_ptr), intent(out) :: part
    end function
    integer(c_int32_t) function cohort_barrier(comm) bind(c)
      import
      type(c_ptr), value :: comm
    end function
    integer(c_int32_t) function cohort_all_reduce_c(comm, input, output, count, dtype, op, work) &
        bind(c, name="cohort_all_reduce")
      import
      type(c_ptr), value :: comm, work
      type(*), dimension(*) :: input, output
      integer(c_int64_t), value :: count
      integer(c_int32_t), value :: dtype, op
    end function
    integer(c_int32_t) function cohort_broadcast_c(comm, values, count, dtype, root, work) &
        bind(c, name="cohort_broadcast")
      import
      type(c_ptr), value :: comm, work
      type(*), dimension(*) :: values
      integer(c_int64_t), value :: count
      integer(c_int32_t), value :: dtype, root
    end function
    integer(c_int32_t) function cohort_all_gather_c(comm, input, output, count, dtype, work) &
        bind(c, name="cohort_all_gather")
      import
      type(c_ptr), value :: comm, work
      type(*), dimension(*) :: input, output
      integer(c_int64_t), value :: count
      integer(c_int32_t), value :: dtype
    end function
    integer(c_int32_t) function cohort_gradients_create(comm, options, gradients) bind(c)
      import
      type(c_ptr), value :: comm, options
      type(c_ptr), intent(out) :: gradients
    end function
    integer(c_int32_t) function cohort_gradients_add_c(gradients, name, parameter, gradient, count, dtype) &
        bind(c, name="cohort_gradients_add")
      import
      type(c_ptr), value :: gradients
      character(kind=c_char), dimension(*), intent(in) :: name
      type(*), dimension(*) :: parameter, gradient
      integer(c_int64_t), value :: count
      integer(c_int32_t), value :: dtype
    end function
    integer(c_int32_t) function cohort_gradients_begin(gradients, samples) bind(c)
      import
      type(c_ptr), value :: gradients
      integer(c_int64_t), value :: samples
    end function
    integer(c_int32_t) function cohort_gradients_ready(gradients, number) bind(c)
      import
      type(c_ptr), value :: gradients
      integer(c_int32_t), value :: number
    end function
    integer(c_int32_t) function cohort_gradients_wait(gradients) bind(c)
      import
      type(c_ptr), value :: gradients
    end function
    integer(c_int32_t) function cohort_gradients_free(gradients) bind(c)
      import
      type(c_ptr), value :: gradients
    end function
    type(c_ptr) function cohort_last_error_c() bind(c, name="cohort_last_error")
      import
    end function
    integer(c_size_t) function c_strlen(text) bind(c, name="strlen")
      import
      type(c_ptr), value :: text
    end function
  end interface

contains

  ! Forms a world by what the launcher set up, else of this process alone; comm is set if the result is cohort_ok.
  integer(c_int32_t) function cohort_init(comm) result(status)
    type(c_ptr), intent(out) :: comm
    status = cohort_init_c(c_null_ptr, comm)
  end function

  integer(c_int32_t) function cohort_init_with(options, comm) result(status)
    type(cohort_init_options), intent(inout), target :: options
    type(c_ptr), intent(out) :: comm
    options%struct_bytes = c_sizeof(options)
    status = cohort_init_c(c_loc(options), comm)
  end function

  ! The text of this thread's last error.
  function cohort_last_error() result(text)
    character(len=:), allocatable :: text
    character(kind=c_char), dimension(:), pointer :: letters
    type(c_ptr) :: address
    integer :: i
    address = cohort_last_error_c()
    call c_f_pointer(address, letters, [c_strlen(address)])
    allocate(character(len=size(letters)) :: text)
    do i = 1, size(letters)
      text(i:i) = letters(i)
    end do
  end function

  ! Operations that wait. The arrays are contiguous and have `count` elements (all_gather: of one rank).
  integer(c_int32_t) function cohort_all_reduce(comm, input, output, count, dtype, op) result(status)
    type(c_ptr), intent(in) :: comm
    type(*), dimension(*) :: input, output
    integer(c_int64_t), intent(in) :: count
    integer(c_int32_t), intent(in) :: dtype, op
    status = cohort_all_reduce_c(comm, input, output, count, dtype, op, c_null_ptr)
  end function

  integer(c_int32_t) function cohort_broadcast(comm, values, count, dtype, root) result(status)
    type(c_ptr), intent(in) :: comm
    type(*), dimension(*) :: values
    integer(c_int64_t), intent(in) :: count
    integer(c_int32_t), intent(in) :: dtype, root
    status = cohort_broadcast_c(comm, values, count, dtype, root, c_null_ptr)
  end function

  integer(c_int32_t) function cohort_all_gather(comm, input, output, count, dtype) result(status)
    type(c_ptr), intent(in) :: comm
    type(*), dimension(*) :: input, output
    integer(c_int64_t), intent(in) :: count
    integer(c_int32_t), intent(in) :: dtype
    status = cohort_all_gather_c(comm, input, output, count, dtype, c_null_ptr)
  end function

  integer(c_int32_t) function cohort_gradients_add(gradients, name, parameter, gradient, count, dtype) result(status)
    type(c_ptr), intent(in) :: gradients
    character(len=*), intent(in) :: name
    type(*), dimension(*) :: parameter, gradient
    integer(c_int64_t), intent(in) :: count
    integer(c_int32_t), intent(in) :: dtype
    status = cohort_gradients_add_c(gradients, trim(name) // c_null_char, parameter, gradient, count, dtype)
  end function
end module
