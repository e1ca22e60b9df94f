-- KEYS[1] meta  [2] flows  [3] sizes  [4] ended  [5] buckets  [6] recent  [7] evicted
-- ARGV[1] prefix of other keys  [2] now, ms  [3] number of minutes; then flows, which may have no jobs any more
-- Returns the checkpoint and, if there is one: the number of scheduled jobs of these flows, of due jobs, the first due time, and
-- the number of jobs for each minute from now on.
local found = mark()
if not found[2] then
  return found
end
local now, minutes = tonumber(ARGV[2]), tonumber(ARGV[3])

local function ms(time)
  return string.format('%.0f', time)
end

local scheduled, due, next_due, per_minute = 0, 0, nil, {}
for minute = 1, minutes do
  per_minute[minute] = 0
end
for i, size in ipairs(sizes_of(ARGV, 4, 1)) do
  local set = ARGV[1] .. 'due:' .. ARGV[3 + i]
  if redis.call('ZCARD', set) ~= (tonumber(size) or 0) then
    return without_mark()
  end
  local first = tonumber(redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')[2])
  if first then
    scheduled = scheduled + size
    next_due = math.min(first, next_due or first)
    due = due + redis.call('ZCOUNT', set, '-inf', ARGV[2])
    local ahead = redis.call('ZCOUNT', set, '(' .. ARGV[2], ms(now + minutes * 60000))
    local minute = 1
    while ahead > 0 do
      local start = now + (minute - 1) * 60000
      local count = redis.call('ZCOUNT', set, '(' .. ms(start), ms(start + 60000))
      per_minute[minute] = per_minute[minute] + count
      ahead, minute = ahead - count, minute + 1
    end
  end
end
found[3], found[4], found[5] = scheduled, due, next_due and ms(next_due) or false
for minute = 1, minutes do
  found[5 + minute] = per_minute[minute]
end
return found
